"""The pace follows how late the event loops of workers are."""

from __future__ import annotations

from server.pace import Pace


class _Paced:
    """A pace, and a clock that a decision falls due by with every lag."""

    def __init__(self, most: int = 32) -> None:
        self.now = 0.0
        self.seen: list[int] = []
        self.pace = Pace(most, lambda: self.seen.append(self.pace.value), clock=lambda: self.now)

    def take(self, *lags: float, every: float = 0.2) -> None:
        for lag in lags:
            self.now += every
            self.pace.take(lag)


def test_loops_in_time_leave_whole_batches() -> None:
    paced = _Paced()

    paced.take(*[0.0001] * 50)

    assert (paced.pace.value, paced.seen) == (32, [])


def test_a_late_loop_is_handed_fewer_and_never_none() -> None:
    paced, least = _Paced(), _Paced(1)

    paced.take(*[0.05] * 50)
    least.take(0.05)

    assert paced.seen[:3] == [22, 15, 10]
    assert paced.pace.value == 2
    assert least.pace.value == 1


def test_what_comes_before_a_decision_has_shown_counts_once() -> None:
    paced = _Paced()

    paced.take(0.05, 0.0, 0.0, 0.0, 0.0, every=0.04)

    assert paced.seen == [22]


def test_a_quiet_time_brings_whole_batches_back() -> None:
    paced = _Paced()
    paced.take(0.05)

    paced.take(*[0.0] * 10)

    assert paced.seen == list(range(22, 33))
