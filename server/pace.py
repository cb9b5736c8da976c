"""How many calls a worker is handed at once: fewer where the gateway's own loop is late."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

_PERIOD = 0.02  # seconds between two looks at the event loop
_NUM_SAMPLES = 5  # that one decision is made of
_MAX_LAG = 0.002  # seconds; every message of every call waits so long, some ten times a call
_SHRINK = 0.7
_LEAST = 2


class Pace:
    """Shrinks while the event loop is late, grows by one while it is not.

    Where a model is large, workers need whole batches and the loop has little to do. Where it is
    small, the loop is what takes the time: a message stands in line behind those of all calls
    under way, new calls stand there too, and more calls at once only make the line longer.
    """

    def __init__(self, most: int, changed: Callable[[], None]) -> None:
        self.value = most
        self._most = most
        self._changed = changed
        self._lags: list[float] = []

    async def watch(self) -> None:
        """Measure how late this task is woken, again and again."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _PERIOD
            await asyncio.sleep(_PERIOD)
            self.take(loop.time() - due)

    def take(self, lag: float) -> None:
        """Take in by how many seconds the loop was late."""
        self._lags.append(lag)
        if len(self._lags) < _NUM_SAMPLES:
            return
        value = self.value
        if statistics.median(self._lags) > _MAX_LAG:
            value = min(value, max(_LEAST, int(value * _SHRINK)))
        elif max(self._lags) <= _MAX_LAG:
            value = min(self._most, value + 1)
        self._lags.clear()
        if value != self.value:
            self.value = value
            self._changed()
