"""How many calls a worker is handed at once: fewer where its event loop is late."""

from __future__ import annotations

import time
from collections.abc import Callable

LAG_KEY = "tokenweir-loop-lag-us"  # trailing metadata of a worker's answers, for the gateway
WAITING_KEY = "tokenweir-waiting"  # metadata of a call: how many wait at the gateway for a worker
_PERIOD = 0.1  # seconds between two decisions: what one has changed must have shown
_MAX_LAG = 0.0015  # seconds; every message of every call waits so long, some ten times a call
_SHRINK = 0.7
_LEAST = 2


class Pace:
    """Shrinks while event loops of workers are late, grows by one while none is.

    Where a model is large, workers need whole batches and their loops have little to do. Where it
    is small, the loop is what takes the time: a message stands in line behind those of all calls
    under way, and more calls at once only make the line longer.
    """

    def __init__(
        self,
        most: int,
        changed: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.value = most
        self._most = most
        self._changed = changed
        self._clock = clock
        self._decided = clock()
        self._worst = 0.0  # lag since then

    def take(self, lag: float) -> None:
        """Take in by how many seconds the loop of a worker is late."""
        self._worst = max(self._worst, lag)
        now = self._clock()
        if now < self._decided + _PERIOD:
            return
        late = self._worst > _MAX_LAG
        self._decided, self._worst = now, 0.0
        value = max(_LEAST, int(self.value * _SHRINK)) if late else self.value + 1
        value = min(value, self.value if late else self._most)
        if value != self.value:
            self.value = value
            self._changed()
