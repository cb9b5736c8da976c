"""How much may be logged: beyond it lines are counted, and the next one says how many."""

from __future__ import annotations

import time
from collections.abc import Callable

RECORDS_PER_SECOND = 10.0  # on average
RECORDS_AT_ONCE = 100


class LogBudget:
    """So many records a second on average, and more at once after a pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = 0  # since the last that was taken
        self._clock = clock
        self._left = float(RECORDS_AT_ONCE)
        self._updated = clock()

    def take(self) -> bool:
        """Is there room for one more?"""
        now = self._clock()
        gained = (now - self._updated) * RECORDS_PER_SECOND
        self._left, self._updated = min(self._left + gained, RECORDS_AT_ONCE), now
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        self.left_out = 0
        return True
