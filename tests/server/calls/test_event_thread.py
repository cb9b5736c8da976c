"""A thread that takes the events of gRPC pauses where they come one soon after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from server.calls import event_thread
from server.calls.event_thread import BackOff, start_event_thread


@dataclass(frozen=True)
class Polled:
    tag: int | None


class Events:
    """Events that come at these times, in milliseconds; a poll takes `poll_takes` of them."""

    def __init__(self, times: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.back_off = BackOff()
        self.poll_takes = 0.0
        self._times = list(times)
        self._now = 0.0
        self._ended = threading.Event()
        monkeypatch.setattr(event_thread, "monotonic", lambda: 100 + self._now / 1000)
        monkeypatch.setattr(event_thread, "sleep", self._sleep)

    def follow(self) -> list[str]:
        start_event_thread(self._poll, self._pass_on, self.back_off)
        assert self._ended.wait(60)
        return self.log

    def _sleep(self, seconds: float) -> None:
        self._now += 1000 * seconds
        self.log.append("pause" if seconds == 0.001 else "rest")

    def _poll(self, until: float | None) -> Polled:
        self._now += self.poll_takes
        if until is None:
            self._now = max(self._now, self._times[0])
        if self._times[0] > self._now:
            return Polled(None)
        self._times.pop(0)
        return Polled(len(self._times))

    def _pass_on(self, event: Polled) -> bool:
        self.log.append(f"event at {self._now:g}")
        if event.tag:
            return True
        self._ended.set()
        return False


def test_events_that_come_now_and_then_are_passed_on_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Events([10, 12.5, 15], monkeypatch).follow()

    assert log == ["event at 10", "event at 12.5", "event at 15"]


def test_who_is_woken_again_soon_takes_what_is_there_and_pauses_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Events([10, 11.5, 11.5, 11.7, 15], monkeypatch).follow()

    assert log == [
        "event at 10",
        "event at 11.5",
        "event at 11.5",
        "pause",
        "event at 12.5",
        "pause",
        "event at 15",
    ]


def test_while_calls_are_refused_the_thread_rests_when_nothing_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events([0, 0, 4, 7, 25], monkeypatch)
    events.back_off.want()

    log = events.follow()

    assert log == [
        "event at 0",
        "event at 0",
        "rest",
        "event at 10",
        "event at 10",
        "event at 25",
    ]


def test_who_waited_for_the_interpreter_does_not_rest_while_events_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events([0, 0, 0, 0], monkeypatch)
    events.poll_takes = 3.0
    events.back_off.want()

    assert events.follow() == ["event at 3", "event at 6", "event at 9", "event at 12"]
