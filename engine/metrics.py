"""Measures that forget what is long ago."""

from __future__ import annotations

import math

_NUM_TURNOVERS = 4.0  # a drain is measured over so many times its least count


class DecayingRate:
    """Events per second, an event counting less the longer ago it was.

    One thread adds and any thread may read: the state is one tuple, replaced as a whole.
    """

    def __init__(self, window: float = 5.0) -> None:
        self._window = window  # seconds in which an event loses 63 % of its weight
        self._state: tuple[float, float, float] | None = None  # weight, when, first event

    def add(self, count: float, now: float) -> None:
        """Count events that happened now."""
        if self._state is None:
            self._state = (count, now, now)
            return
        weight, when, first = self._state
        self._state = (weight * math.exp((when - now) / self._window) + count, now, first)

    def at(self, now: float) -> float:
        """Return the rate as of now; 0 before the first event."""
        if self._state is None:
            return 0.0
        weight, when, first = self._state
        # A young counter has seen a part of the window only.
        seen = max(1e-3, 1 - math.exp((first - now) / self._window))
        return weight * math.exp((when - now) / self._window) / (self._window * seen)


class DecayingLeast:
    """The least of the values of late; one that is not reached any more rises slowly."""

    def __init__(self, window: float) -> None:
        self._window = window  # seconds in which it comes 63 % nearer to values above it
        self._when = 0.0
        self.value: float | None = None  # None before the first

    def add(self, value: float, now: float) -> None:
        """Take in a value measured now."""
        if self.value is None or value <= self.value:
            self.value = value
        else:
            self.value += (value - self.value) * (1 - math.exp((self._when - now) / self._window))
        self._when = now


class DrainMeter:
    """Measures how much the waiting requests are given per second in which there are some.

    Later gifts displace old ones, time does not: a few times `least_count` of them count, however
    long that takes. Time without a queue says nothing of how fast it drains.
    """

    def __init__(self, least_count: int) -> None:
        self._least_count = least_count
        self._count = 0.0
        self._seconds = 0.0
        self._waiting_since: float | None = None

    @property
    def rate(self) -> float | None:
        """Gifts a second; None until `least_count` were given."""
        if self._count < self._least_count or self._seconds <= 0:
            return None
        return self._count / self._seconds

    def advance(self, now: float, num_given: int, is_waiting: bool) -> None:
        """Note how many were given since the last time, and if somebody still waits."""
        if self._waiting_since is not None:
            self._seconds += now - self._waiting_since
            kept = math.exp(-num_given / (_NUM_TURNOVERS * self._least_count))
            self._count = self._count * kept + num_given
            self._seconds *= kept
        self._waiting_since = now if is_waiting else None
