"""The learning rate of a step: linear warm-up, then the inverse square root of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True)
class InverseSquareRootSchedule:
    """Section 5.3 of "Attention Is All You Need", written by the peak that warm-up ends in.

    The paper's factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5) is this with
    peak = factor * (d_model * warmup_steps)**-0.5. With a floor it is peak * max(floor, .), in the
    warm-up too.
    """

    peak: float
    warmup_steps: int
    floor: float = 0.0  # the least share of the peak; 0: none

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise ConfigError(f"the peak learning rate must be above 0, got {self.peak}")
        if self.warmup_steps < 1:
            raise ConfigError(f"warmup_steps must be at least 1, got {self.warmup_steps}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"the floor must be a share of the peak, 0 to 1, got {self.floor}")

    def learning_rate(self, step: int) -> float:
        """Return the rate of update number `step`; the first is 1."""
        share = min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))
        return self.peak * max(self.floor, share)
