"""Finds the highest rate at which a server keeps its bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.load_report import Trial

Measure = Callable[[float, int], Trial | None]  # at a rate, with a seed; None: interrupted

_FIRST_STEP, _LATER_STEP = 2.0, 1.2  # factors between the rates by which a bracket is found
_ATTEMPTS = 3  # at a rate at which the client was late
_MIN_RATE, _MAX_RATE = 1e-3, 1e6  # requests a second


@dataclass(frozen=True)
class SearchRule:
    """How long it is searched.

    A round looks for a rate that keeps the bounds below one that does not, and halves the
    interval between them, on the scale of their logarithms, until the upper one is at most
    1 + `tolerance` times the lower one. Rounds draw arrivals of their own.
    """

    first_rate: float = 1.0  # requests a second, where the first round begins
    tolerance: float = 0.05
    num_rounds: int = 6


@dataclass(frozen=True)
class Round:
    """The ends of the interval that a round has come to."""

    low: float  # requests a second that keep the bounds
    high: float  # the same that miss them


@dataclass(frozen=True)
class Search:
    """The result: the median of the rounds' lower ends, and the range of all ends."""

    rate: float | None  # requests a second that keep the bounds; None: none was found
    low: float | None
    high: float | None
    confidence: float  # probability that the median of many such rounds is between low and high
    rule: str  # by which it was stopped
    stopped: str  # why it ended before its rounds were done; "" if they are
    rounds: tuple[Round, ...]


class _Stopped(Exception):
    """The search cannot go on; says why."""


class RateSearch:
    """A search under way; `trials` are all that were made."""

    def __init__(self, measure: Measure, rule: SearchRule) -> None:
        self._measure = measure
        self._rule = rule
        self._seed = 0
        self.trials: list[Trial] = []

    def find(self) -> Search:
        """Search until the rounds are done, or nothing more can be found."""
        found: list[Round] = []
        stopped = ""
        try:
            for _ in range(self._rule.num_rounds):
                start = _median(found) or self._rule.first_rate
                found.append(self._round(start, _LATER_STEP if found else _FIRST_STEP))
        except _Stopped as reason:
            stopped = str(reason)
        except KeyboardInterrupt:  # between two tests; one under way ends by itself
            stopped = "interrupted"
        return self._result(found, stopped)

    def _round(self, start: float, step: float) -> Round:
        """Return a rate that kept the bounds, and one not above 1 + tolerance times it."""
        low, high = self._bracket(start, step)
        while high / low > 1 + self._rule.tolerance:
            middle = math.sqrt(low * high)
            if self._keeps(middle):
                low = middle
            else:
                high = middle
        return Round(low, high)

    def _bracket(self, rate: float, step: float) -> tuple[float, float]:
        """Return a rate that keeps the bounds and a higher one that does not."""
        low: float | None = None
        high: float | None = None
        while low is None or high is None:
            if not _MIN_RATE <= rate <= _MAX_RATE:
                what = "no rate kept" if low is None else "every rate kept"
                raise _Stopped(f"{what} the bounds, down to or up to {rate:g} requests/s")
            if self._keeps(rate):
                low, rate = rate, rate * step
            else:
                high, rate = rate, rate / step
        return low, high

    def _keeps(self, rate: float) -> bool:
        reasons: tuple[str, ...] = ()
        for _ in range(_ATTEMPTS):
            self._seed += 1
            trial = self._measure(rate, self._seed)
            if trial is None:
                raise _Stopped("interrupted")
            self.trials.append(trial)
            if not (reasons := trial.invalid):
                return trial.is_kept
        raise _Stopped(f"at {rate:.4g} requests/s {reasons[0]}")

    def _result(self, found: list[Round], stopped: str) -> Search:
        rule = self._rule
        return Search(
            rate=_median(found),
            low=min((one.low for one in found), default=None),
            high=max((one.high for one in found), default=None),
            confidence=float(1 - 2.0 ** (1 - len(found))) if found else 0.0,
            rule=(
                f"bisection until the interval is {rule.tolerance:.1%} wide, "
                f"{rule.num_rounds} rounds"
            ),
            stopped=stopped,
            rounds=tuple(found),
        )


def _median(found: list[Round]) -> float | None:
    return statistics.median(one.low for one in found) if found else None
