"""The loss and the speed of a training run, for those who watch it."""

from __future__ import annotations

import time
from collections.abc import Callable

_SMOOTHING = 0.98  # weight of the past; about the last 50 steps count


class Pace:
    """A smoothed loss, and the speed since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._tokens = self._steps = 0
        self._loss = 0.0

    def add(self, loss: float, num_tokens: int) -> None:
        """Count a step."""
        past = min(_SMOOTHING, self._steps / (self._steps + 5))  # the first counts little soon
        self._loss = past * self._loss + (1 - past) * loss
        self._steps += 1
        self._tokens += num_tokens

    def seconds_for(self, steps: int) -> float:
        """Return about how long so many steps take."""
        return steps * (self._clock() - self._started) / self._steps

    def __str__(self) -> str:
        speed = self._tokens / max(self._clock() - self._started, 1e-9)
        return f"loss {self._loss:.4f}, {speed:,.0f} tokens/s"
