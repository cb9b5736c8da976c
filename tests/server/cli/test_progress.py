"""Progress: a bar, and without a terminal a line now and then."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from server.cli import progress
from server.cli.progress import Tell, show_progress
from tests.fakes.clock import FakeClock


class _TellingConsole(progress.Console):
    """Says when so many lines were printed."""

    def __init__(self, **options: object) -> None:
        super().__init__(stderr=True)
        self.lines: list[str] = []
        self.two = threading.Event()
        consoles.append(self)

    def print(self, *objects: object, **_: object) -> None:
        self.lines.append(str(objects[0]))
        if len(self.lines) >= 2:
            self.two.set()


consoles: list[_TellingConsole] = []


Told = Callable[[], str]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Iterator[tuple[Tell, Told]]:
    """Show progress; what tells of it, and the line that is printed behind what was told."""
    monkeypatch.setattr(progress, "Console", _TellingConsole)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))

    def printed() -> str:
        console.lines.clear()
        console.two.clear()
        assert console.two.wait(60)
        return console.lines[-1]

    with show_progress("Rounds", interval=0.01) as tell:
        console = consoles.pop()
        yield tell, printed


def test_a_line_comes_now_and_then_also_when_nothing_is_told(
    line: tuple[Tell, Told], clock: FakeClock
) -> None:
    tell, printed = line

    assert printed() == "Rounds: 0 s"
    clock.now += 30
    assert printed() == "Rounds: 30 s"
    tell(3, 1200)
    assert printed() == "Rounds: 3 of 1,200, 30 s"


@pytest.mark.parametrize(
    ("width", "words"),
    [(80, "numbers of threads "), (120, "Comparing with PyTorch, numbers of threads ")],
)
def test_a_bar_is_whole_in_a_terminal_of_80_columns(
    width: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = StringIO()
    options: dict[str, Any] = {
        "file": seen,
        "force_terminal": True,
        "width": width,
        "color_system": None,
    }
    monkeypatch.setattr(progress, "Console", lambda **_: Console(**options))

    with show_progress("Comparing with PyTorch") as tell:
        tell(320, 1650, "numbers of threads", 3000)

    shown = [line for line in seen.getvalue().split("\r") if "320" in line][-1]
    assert words in shown
    assert re.search("━ +320/1650 about 50 minutes more 0:00:0", shown), shown


def test_a_line_says_what_is_done_and_how_long_the_rest_takes(
    line: tuple[Tell, Told], clock: FakeClock
) -> None:
    """Between two tellings the rest is counted down."""
    tell, printed = line

    tell(0, 0, "tracing graphs", 200)
    assert printed() == "Rounds, tracing graphs: about 3 minutes more"
    tell(32, 150, "beams", 130)
    assert printed() == "Rounds, beams: 32 of 150, about 2 minutes more"
    clock.now += 100
    assert printed() == "Rounds, beams: 32 of 150, about 30 seconds more"
    clock.now += 100
    assert printed() == "Rounds, beams: 32 of 150, about 5 seconds more"


def test_a_short_command_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("Rounds") as tell:
        tell(1, 1)

    assert capsys.readouterr().err == ""
