"""Turns: what is compared is measured one after the other, again and again.

Whatever disturbs the machine for a while disturbs all of them, and neighbours are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """Return all in the order of one turn; each is first as often as the others."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


@dataclass(frozen=True)
class Ratio:
    """Ratios of neighbours, over all turns."""

    median: float
    least: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} - {self.largest:.2f})"


def ratio_of(ones: Iterable[float], others: Iterable[float]) -> Ratio:
    """Return how many times the others the ones are, turn by turn."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return Ratio(statistics.median(found), min(found), max(found))
