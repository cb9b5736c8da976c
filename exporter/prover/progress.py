"""Tells how far a proof has come, and about how long it takes."""

from __future__ import annotations

import time
from functools import cache

import numpy as np

from exporter.progress import Progress

_PASSES = 2.0  # operations for each parameter and token
_CALLS = 1e-5  # seconds of a token that are no arithmetic: calls of graphs and of torch
_KNOWN = 0.05  # share of the work, behind which its own speed tells more than the machine's
_SIZE = 1024  # width of the matrices whose product tells the machine's speed


def seconds_for(work: float, num_parameters: int) -> float:
    """Return about how long so many tokens of a model take here."""
    return work * (_PASSES * num_parameters / _operations_per_second() + _CALLS)


@cache
def _operations_per_second() -> float:
    one = np.random.default_rng(0).random((_SIZE, _SIZE), np.float32)
    one @ one  # the first call of all is slower
    started = time.perf_counter()
    one @ one
    return 2 * _SIZE**3 / (time.perf_counter() - started)


class Meter:
    """Counts the work of a proof, and tells it."""

    def __init__(self, tell: Progress, work: float, expected: float) -> None:
        """All `work` is `expected` to take so many seconds."""
        self._tell = tell
        self._work = work
        self._expected = expected
        self._done = 0.0
        self._started = time.monotonic()

    def add(self, work: float, what: str, num_cases: int) -> None:
        """Count work that is done, of so many cases in all."""
        self._done += work
        share = min(1.0, self._done / self._work)
        spent = time.monotonic() - self._started
        whole = self._expected if share < _KNOWN else spent / share
        self._tell(int(share * num_cases), num_cases, what, max(0.0, whole - spent))
