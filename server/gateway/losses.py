"""Remembers how many workers a request has lost: a repeated request has the same bytes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

_KEPT = 60.0  # seconds after the last loss; a client has given up asking by then


class Losses:
    """Workers lost, by request. Nothing is hashed as long as none is lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[bytes, int] = {}
        self._times: dict[bytes, float] = {}  # the last loss of each, the oldest first

    @property
    def has_any(self) -> bool:
        """Whether a worker was lost of late."""
        self._forget_old()
        return bool(self._counts)

    def of(self, request: bytes) -> int:
        """Return how many workers the request has lost of late."""
        self._forget_old()
        return self._counts.get(_digest(request), 0) if self._counts else 0

    def note(self, request: bytes, count: int) -> None:
        """Note that a call with this request has just lost a worker, its `count`th.

        Equal requests that are lost together count once, for they have lost one worker.
        """
        self._forget_old()
        digest = _digest(request)
        self._counts[digest] = max(count, self._counts.get(digest, 0))
        self._times.pop(digest, None)
        self._times[digest] = self._clock()

    def _forget_old(self) -> None:
        while self._times:
            oldest = next(iter(self._times))
            if self._clock() - self._times[oldest] <= _KEPT:
                return
            del self._times[oldest], self._counts[oldest]


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
