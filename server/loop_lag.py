"""How late the event loop of this process is."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

PERIOD = 0.02  # seconds between two looks at the event loop
_NUM_SAMPLES = 5  # so that one late moment does not count


class LoopLag:
    """Wakes up again and again, and notes how late that was."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque([0.0], maxlen=_NUM_SAMPLES)

    @property
    def seconds(self) -> float:
        """How late, as a rule, something is that is due now; the median of late."""
        return statistics.median(self._lags)

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD
            await asyncio.sleep(PERIOD)
            self.take(loop.time() - due)

    def take(self, lag: float) -> None:
        """Take in by how many seconds the loop was late."""
        self._lags.append(lag)
