"""Rates of requests over time: constant, a ramp, or steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

import numpy as np

from loadtest.errors import LoadTestError

Times = np.ndarray[tuple[int], np.dtype[np.float64]]

_GRID = 8193  # points of time between which a ramp is as good as a line


@dataclass(frozen=True)
class Rates:
    """Requests a second: of a ramp from the first to the last, of steps one after the other."""

    values: tuple[float, ...]
    is_ramp: bool = False

    def __post_init__(self) -> None:
        if not self.values or not all(math.isfinite(one) and one > 0 for one in self.values):
            raise LoadTestError(f"rate ({self}) must be above 0 requests per second")
        if self.is_ramp and len(self.values) != 2:
            raise LoadTestError(f"rate ({self}): a ramp has two ends, such as 10-100")

    def __str__(self) -> str:
        return ("-" if self.is_ramp else ",").join(f"{value:g}" for value in self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def is_constant(self) -> bool:
        return len(set(self.values)) == 1

    def times(self, counts: Times, span: float) -> Times:
        """Return when so many requests (not whole ones either) are due, both in rising order.

        The rates take `span` seconds; behind it the last one goes on.
        """
        if self.is_constant:
            return counts / self.values[0]
        grid, due = self._due_until(span)
        behind = np.maximum(counts - due[-1], 0.0) / self.values[-1]
        return cast(Times, np.interp(counts, due, grid) + behind)

    def _due_until(self, duration: float) -> tuple[Times, Times]:
        """Return points of time, and how many requests are due until each."""
        if self.is_ramp:
            grid = np.linspace(0.0, duration, _GRID)
            first, last = self.values
            return grid, first * grid + (last - first) * grid**2 / (2 * duration)
        grid = np.linspace(0.0, duration, len(self.values) + 1)
        return grid, np.append(0.0, np.cumsum(self.values)) * duration / len(self.values)


def parse_rates(text: str) -> Rates:
    """Return `50`, a ramp `10-100` or steps `10,20,40`; LoadTestError for anything else."""
    if text.strip("+-").lower() in ("nan", "inf", "infinity"):
        raise LoadTestError(f"{text} is not a finite rate")
    number = r"[0-9.]+(?:e[+-]?[0-9]+)?"
    try:
        if found := re.fullmatch(rf"({number})-({number})", text):
            return Rates((float(found[1]), float(found[2])), is_ramp=True)
        return Rates(tuple(float(part) for part in text.split(",")))
    except ValueError as error:
        raise LoadTestError(
            f"{text[:100]!r} is not a rate; give requests per second, such as 50, a ramp 10-100 or "
            "steps 10,20,40"
        ) from error
