"""What trying a model out has shown, before it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """How the model behaves on this machine, with the engine's own settings."""

    rows_are_bit_equal: bool = True  # alone and among others
    step_seconds: float = 0.0  # that the largest step takes; 0: it was not looked at
