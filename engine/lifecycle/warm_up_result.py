"""The result of trying a model out, before it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmUpResult:
    """How the model behaves on this machine, with the engine's own settings."""

    is_batch_invariant: bool = True  # the same bits alone and among others
    step_seconds: float = 0.0  # that the largest step takes; 0: it was not looked at
