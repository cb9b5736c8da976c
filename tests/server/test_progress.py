"""Progress without a terminal: a line now and then."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from server.cli import progress
from server.cli.progress import show_progress
from tests.conftest import FakeClock


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


def test_a_line_comes_now_and_then_also_when_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr(progress, "Console", _TellingConsole)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    with show_progress("Rounds", interval=0.01) as tell:
        console = consoles.pop()
        assert console.two.wait(60)
        silent = console.lines[0]
        tell(3, 1200)
        console.lines.clear()
        console.two.clear()
        assert console.two.wait(60)

    assert silent == "Rounds: 0 s"
    assert console.lines[-1] == "Rounds: 3 of 1,200, 0 s"


def test_a_short_command_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("Rounds") as tell:
        tell(1, 1)

    assert capsys.readouterr().err == ""
