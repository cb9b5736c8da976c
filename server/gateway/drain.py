"""How fast calls leave the queue of the gateway, as far ahead as one has to look."""

from __future__ import annotations

from engine.metrics import DrainMeter

_LEAST_COUNT = 16  # calls, below which the drain is not known
_NUM_METERS, _TIMES = 4, 4  # each measures over so many times as many calls as the one before
_LOOK_AHEAD = 16  # times a meter's least count that is foretold by it, or by the longest


class Drain:
    """Foretells a long queue by what many calls took, a short one by the last few.

    The last few tell best what the next ones take; but a moment in which little is done, as when
    thousands of calls come at once and are read, does not last as long as a long queue.
    """

    def __init__(self) -> None:
        self._meters = [DrainMeter(_LEAST_COUNT * _TIMES**i) for i in range(_NUM_METERS)]
        self._is_waiting = False

    def advance(self, now: float, num_given: int, is_waiting: bool) -> None:
        """Note how many calls had their turn since the last time, and if one still waits."""
        if not (is_waiting or self._is_waiting):
            return
        self._is_waiting = is_waiting
        for meter in self._meters:
            meter.advance(now, num_given, is_waiting)

    def seconds(self, num_calls: int) -> float | None:
        """Return how long so many calls will take to leave; None if that is not known yet."""
        rate, foretold = None, _LOOK_AHEAD * _LEAST_COUNT
        for meter in self._meters:
            rate = meter.rate or rate
            if num_calls <= foretold:
                break
            foretold *= _TIMES
        return None if rate is None else num_calls / rate
