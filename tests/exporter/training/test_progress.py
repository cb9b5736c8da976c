"""A bar on a terminal, plain lines elsewhere, nothing when not asked for."""

from __future__ import annotations

import io
import re

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


def test_a_bar_has_room_for_all_that_it_tells_in_eighty_columns() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=80)

    with make_progress(True, "Training classification", 40_000, 0, console) as display:
        display.step(39_999, 12.3456, 0)

    last = re.split("[\r\n]", output.getvalue())[-2]
    assert "Training classification" in last and "39999/40000 loss 12.3456" in last
    assert "0 tokens/s" in last and "…" not in last and "━━" in last


def test_anything_else_gets_a_line_every_ten_seconds_and_at_the_end() -> None:
    console, output = make_console(terminal=False)
    now = [0.0]
    display = LineProgress(console, "Training dates", 6, clock=lambda: now[0])

    with display:
        for step in range(1, 7):
            now[0] += 4.0
            display.step(step, 0.5, 400)

    assert output.getvalue().splitlines() == [
        "Training dates: step 3/6  loss 0.5000  100 tokens/s  12 s left",
        "Training dates: step 6/6  loss 0.5000  100 tokens/s",
    ]


def test_lines_say_how_long_it_takes_and_a_loss_that_soon_forgets_the_first() -> None:
    console, output = make_console(terminal=False)
    now = [0.0]
    display = LineProgress(console, "Training dates", 1000, clock=lambda: now[0])

    with display:
        for step in range(501, 526):  # a run that goes on
            now[0] += 0.5
            display.step(step, 8.0 if step == 501 else 1.0, 400)

    (line,) = output.getvalue().splitlines()
    assert line.startswith("Training dates: step 520/1000") and line.endswith("4 min left")
    assert float(line.split("loss ")[1].split()[0]) < 2


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
