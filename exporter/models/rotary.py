"""Rotary positions (Su et al. 2021): queries and keys are turned by an angle for their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from exporter.models.config import RotaryScaling, TransformerConfig
from exporter.operators.heads import rotate


class RotaryPositions(nn.Module):
    """Cosines and sines of every place up to a limit; column i turns i and i + width / 2.

    They are rounded as those that published models were trained with: angles in float32.
    """

    def __init__(
        self, max_len: int, width: int, *, base: float, scaling: RotaryScaling | None = None
    ) -> None:
        super().__init__()
        self.cos: Tensor  # (max_len, width / 2)
        self.sin: Tensor  # (max_len, width / 2)
        frequencies = rotary_frequencies(width, base=base, scaling=scaling)
        angles = torch.arange(max_len).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Turn (B, h, S, width), whose places count from 0."""
        length, max_len = heads.shape[2], self.cos.shape[0]
        if length > max_len:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {max_len} of this model; "
                "shorten it or build the model with a larger limit"
            )
        return rotate(heads, self.cos[:length], self.sin[:length])


def make_rotary(config: TransformerConfig, max_len: int) -> RotaryPositions | None:
    """Return the rotary positions of a model, None if it has others."""
    if config.positions != "rotary":
        return None
    return RotaryPositions(
        max_len, config.head_key_dim, base=config.rotary_base, scaling=config.rotary_scaling
    )


def rotary_frequencies(width: int, *, base: float, scaling: RotaryScaling | None = None) -> Tensor:
    """Return the angles from one place to the next, float32 (width / 2,)."""
    frequencies = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
    return frequencies if scaling is None else _stretch(frequencies, scaling)


def _stretch(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    turns = scaling.original_max_len / (2 * math.pi / frequencies)  # in the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slowed down whole, 1: not at all
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
