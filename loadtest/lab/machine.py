"""The speed of the machine itself: bytes read and numbers multiplied per second."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

_READ_BYTES = 2**29  # far more than any cache
_MATRIX = 2048
_REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """The best of several measurements: a floor is to be what cannot be beaten."""

    bytes_per_second: float  # read by all threads together
    flops_per_second: float  # float32 matrix products, by as many threads as the library takes

    def floor(self, num_bytes: float, num_flops: float) -> float:
        """Return the least seconds for so many bytes read and so much arithmetic."""
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


def measure_machine(num_threads: int) -> Machine:
    """Read a large array with all threads at once, and multiply two matrices."""
    return Machine(_read_rate(num_threads), _product_rate())


def _read_rate(num_threads: int) -> float:
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:  # numpy lets go of the lock meanwhile
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            list(pool.map(np.dot, parts, parts))  # the fastest reader of those tried
            seconds.append(time.perf_counter() - started)
    return _READ_BYTES / min(seconds)


def _product_rate() -> float:
    left, right = np.ones((2, _MATRIX, _MATRIX), np.float32)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return float(2 * _MATRIX**3 / min(seconds))
