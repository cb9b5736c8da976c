"""A bar on a terminal, plain lines elsewhere, nothing when not asked for."""

from __future__ import annotations

import io

from rich.console import Console

from exporter.training.progress import BarProgress, LineProgress, make_progress


def make_console(terminal: bool) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=terminal, width=120), output


def test_a_terminal_gets_a_bar_with_loss_and_speed() -> None:
    console, output = make_console(terminal=True)

    with make_progress(True, "Training dates", 10, 0, console) as display:
        assert isinstance(display, BarProgress)
        for step in range(1, 11):
            display.step(step, 1.25, 1000)
        display.say("Validation [100%]")

    shown = output.getvalue()
    assert "Training dates" in shown and "10/10" in shown
    assert "loss 1.2500" in shown and "tokens/s" in shown
    assert "Validation [100%]" in shown


def test_anything_else_gets_a_line_every_ten_seconds_and_at_the_end() -> None:
    console, output = make_console(terminal=False)
    now = [0.0]
    display = LineProgress(console, "Training dates", 6, clock=lambda: now[0])

    with display:
        for step in range(1, 7):
            now[0] += 4.0
            display.step(step, 0.5, 400)

    assert output.getvalue().splitlines() == [
        "Training dates: step 3/6  loss 0.5000  100 tokens/s",
        "Training dates: step 6/6  loss 0.5000  100 tokens/s",
    ]


def test_plain_lines_hold_no_control_codes() -> None:
    console, output = make_console(terminal=False)

    with make_progress(True, "Training dates", 1, 0, console) as display:
        assert isinstance(display, LineProgress)
        display.step(1, 0.5, 10)

    assert "\x1b" not in output.getvalue()


def test_silence_is_silent() -> None:
    console, output = make_console(terminal=True)

    with make_progress(False, "Training dates", 1, 0, console) as display:
        display.step(1, 0.5, 10)
        display.say("nothing")

    assert output.getvalue() == ""
