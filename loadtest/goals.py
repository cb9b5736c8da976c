"""Goals for a server: bounds of latencies, and how much of the load keeps them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.metrics import RequestRecord, Window, due_in

_FORM = "give bounds such as ttft=200ms,tpot=50ms,e2e=2s"
_LENGTHS_OF_A_BOUND = 10
_UNITS = MappingProxyType({"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0})


def _longest_gap(record: RequestRecord) -> float | None:
    return max(record.inter_token_latencies, default=None)


_MEASURES: Mapping[str, Callable[[RequestRecord], float | None]] = MappingProxyType(
    {
        "ttft": lambda record: record.time_to_first_token,
        "itl": _longest_gap,
        "tpot": lambda record: record.time_per_output_token,
        "e2e": lambda record: record.end_to_end,
    }
)


@dataclass(frozen=True)
class Slo:
    """Bounds in seconds by name: ttft, tpot, e2e, and itl, of the longest gap of a request.

    A bound is kept if the percentile of all requests that were due is not above it; one that
    failed is above every bound. A value that a request does not have, such as the time of a second
    token, is no miss. If no answer came token by token, bounds of tokens are not kept: nothing
    says that they are.
    """

    bounds: Mapping[str, float]
    percentile: float = 99.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.bounds if name not in _MEASURES]
        if unknown or not self.bounds:
            known = ", ".join(_MEASURES)
            raise LoadTestError(
                f"{', '.join(unknown) or 'nothing'} is not a latency; known: {known}"
            )
        for name, bound in self.bounds.items():
            if not 0 < bound < math.inf:
                raise LoadTestError(f"{name} ({bound}) must be above 0 seconds; {_FORM}")

    @property
    def seconds_to_see(self) -> float:
        """How long a test has to be at least for a queue that grows to show within a tenth.

        At a rate that is too high by a share, waits grow by that share of the time.
        """
        return _LENGTHS_OF_A_BOUND * max(self.bounds.values())

    def is_kept_by(self, record: RequestRecord) -> bool:
        """Return whether one request has kept all bounds."""
        return record.ok and all(
            (value := _MEASURES[name](record)) is None or value <= bound
            for name, bound in self.bounds.items()
        )


@dataclass(frozen=True)
class Goodput:
    """Requests that kept all bounds."""

    per_second: float
    share: float  # among all that were due
    num_kept: int
    num_due: int


@dataclass(frozen=True)
class GoalOutcome:
    """One bound, and the latency that is held against it."""

    name: str  # "ttft"
    percentile: float
    bound: float  # seconds
    value: float | None  # seconds; None: the percentile has none
    is_kept: bool
    why_none: str = ""

    def __str__(self) -> str:
        value = (
            f"none, for {self.why_none}" if self.value is None else f"{self.value * 1000:.1f} ms"
        )
        return f"p{self.percentile:g} of {self.name} is {value}, bound {self.bound * 1000:g} ms"


def parse_slo(text: str, percentile: float = 99.0) -> Slo:
    """Return bounds that were typed as ttft=200ms,tpot=50ms,e2e=2s; LoadTestError for others."""
    bounds = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9.]+)\s*(us|ms|s|m)\s*", part)
        if found is None:
            raise LoadTestError(f"{part[:100]!r} is not a bound of a latency; {_FORM}")
        try:
            bounds[found[1].lower()] = float(found[2]) * _UNITS[found[3]]
        except ValueError as error:
            raise LoadTestError(f"{part[:100]!r} has no number; {_FORM}") from error
    return Slo(bounds, percentile)


def is_lost(records: Sequence[RequestRecord], window: Window, slo: Slo, num_due: int) -> bool:
    """Return whether too many of `num_due` have missed a bound for the rest to help."""
    num_missed = sum(not slo.is_kept_by(record) for record in due_in(records, window))
    return num_missed > math.ceil(num_due * (1 - slo.percentile / 100)) * len(slo.bounds)


def goodput(records: Sequence[RequestRecord], window: Window, slo: Slo) -> Goodput:
    """Return how much of what was due in the window kept all bounds."""
    due = due_in(records, window)
    num_kept = 0
    if _has_tokens(due) or set(slo.bounds) == {"e2e"}:
        num_kept = sum(map(slo.is_kept_by, due))
    return Goodput(
        per_second=num_kept / window.duration if window.duration else 0.0,
        share=num_kept / len(due) if due else 0.0,
        num_kept=num_kept,
        num_due=len(due),
    )


def outcomes(records: Sequence[RequestRecord], window: Window, slo: Slo) -> tuple[GoalOutcome, ...]:
    """Return how each bound was kept; where nothing was due, none was."""
    due = due_in(records, window)
    return tuple(_outcome(name, bound, due, slo) for name, bound in slo.bounds.items())


def _outcome(name: str, bound: float, due: list[RequestRecord], slo: Slo) -> GoalOutcome:
    measured = [_MEASURES[name](record) if record.ok else math.inf for record in due]
    values = [value for value in measured if value is not None]
    if not values:
        if _has_tokens(due):  # but none has such a latency: nothing to keep
            return GoalOutcome(name, slo.percentile, bound, 0.0, True)
        why = "no answer came token by token" if due else "no request was due"
        return GoalOutcome(name, slo.percentile, bound, None, False, why)
    # A value that was measured, and not one between it and the infinite one of a failure.
    at = float(np.percentile(values, slo.percentile, method="higher"))
    if not math.isfinite(at):
        return GoalOutcome(name, slo.percentile, bound, None, False, "requests failed")
    return GoalOutcome(name, slo.percentile, bound, at, at <= bound)


def _has_tokens(due: list[RequestRecord]) -> bool:
    return any(record.token_times for record in due)
