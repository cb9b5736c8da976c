"""A thread that takes the events of gRPC pauses where they come one soon after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from server import event_thread
from server.event_thread import Rests, start_event_thread

SOON, LATER = 0.0015, 0.0025  # seconds, within two pauses of a millisecond and not


class Events:
    """Events that come so long after the one before was asked for."""

    def __init__(self, waits: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.rests = Rests()
        self._waits = list(waits)
        self._now = 100.0
        self._ended = threading.Event()
        monkeypatch.setattr(event_thread, "monotonic", lambda: self._now)
        monkeypatch.setattr(event_thread, "sleep", self._sleep)

    def follow(self, *, pauses: bool = True) -> list[str]:
        start_event_thread("events", self._next, self._pass_on, self.rests, pauses=pauses)
        assert self._ended.wait(10)
        return self.log

    def _sleep(self, seconds: float) -> None:
        self.log.append("pause" if seconds == 0.001 else f"rest until {self._now + seconds:.3f}")

    def _next(self) -> int:
        self._now += self._waits.pop(0)
        return len(self._waits)

    def _pass_on(self, num_left: int) -> bool:
        self.log.append("event")
        if num_left:
            return True
        self._ended.set()
        return False


def test_events_that_come_now_and_then_are_passed_on_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Events([LATER] * 3, monkeypatch).follow() == ["event"] * 3


def test_who_is_woken_again_soon_pauses_behind_the_event_and_takes_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Events([LATER, SOON, 0.0, 0.0, SOON, LATER, 0.0], monkeypatch).follow()

    assert log == ["event", "event", "pause", "event", "event", "event", "pause", "event", "event"]


def test_who_is_woken_rests_until_all_wake_while_calls_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events([0.004, 0.0, 0.0, 0.013, 0.0], monkeypatch)
    events.rests.want()

    log = events.follow()

    assert log == ["event", "rest until 100.010", "event", "event", "event", "event"]


def test_where_events_are_joined_already_nobody_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Events([LATER, SOON, SOON], monkeypatch).follow(pauses=False) == ["event"] * 3
