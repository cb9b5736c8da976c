"""Values counted by size, in plain numbers: what a metrics page shows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds, in seconds: of what a request waits for, and of what a step takes.
LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
STEP_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064),
    *(0.128, 0.256, 0.512, 1.024, 2.048, 4.096),
)
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """One thread adds, and any may read: what it sees may lack the last value."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` rise; a value belongs to the first that is not below it."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def counts(self) -> list[float]:
        """Return how many values are in each bucket, and last the sum of all values."""
        return [*self._counts, self._sum]
