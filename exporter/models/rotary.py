"""Rotary positions (Su et al. 2021): queries and keys are turned by an angle for their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import (
    AnyScaling,
    LinearScaling,
    LongScaling,
    RotaryScaling,
    TransformerConfig,
    YarnScaling,
)
from exporter.operators.heads import rotate


class RotaryPositions(nn.Module):
    """Cosines and sines of every place up to a limit; column i turns i and i + width / 2.

    They are rounded as those that published models were trained with: angles in float32.
    """

    def __init__(
        self,
        max_len: int,
        width: int,
        *,
        base: float,
        scaling: AnyScaling | None = None,
        turned: int | None = None,
    ) -> None:
        """`turned` numbers of a head turn, the first of each half; None: all."""
        super().__init__()
        self.cos: Tensor  # (max_len, width / 2)
        self.sin: Tensor  # (max_len, width / 2)
        frequencies = rotary_frequencies(turned or width, base=base, scaling=scaling)
        angles = torch.arange(max_len).float()[:, None] * frequencies
        factor = _attention_factor(scaling)
        still = (0, width // 2 - len(frequencies))
        cos, sin = (
            F.pad(angles.cos() * factor, still, value=1.0),
            F.pad(angles.sin() * factor, still),
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Turn (B, h, S, width), whose places count from 0."""
        length, max_len = heads.shape[2], self.cos.shape[0]
        if not torch.compiler.is_exporting() and length > max_len:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {max_len} of this model; "
                "shorten it or build the model with a larger limit"
            )
        return rotate(heads, self.cos[:length], self.sin[:length])


def make_rotary(config: TransformerConfig, max_len: int) -> RotaryPositions | None:
    """Return the rotary positions of a model, None if it has others."""
    if config.positions.kind != "rotary":
        return None
    base, scaling = config.positions.rotary_base, config.positions.rotary_scaling
    return _positions(config, max_len, base, scaling)


def make_local_rotary(config: TransformerConfig, max_len: int) -> RotaryPositions | None:
    """Return the rotary positions of layers with a window, None if they are those of all."""
    if config.positions.local_rotary_base is None:
        return None
    return _positions(config, max_len, config.positions.local_rotary_base, None)


def _positions(
    config: TransformerConfig, max_len: int, base: float, scaling: AnyScaling | None
) -> RotaryPositions:
    width, turned = config.head_key_dim, config.turned_dim
    return RotaryPositions(max_len, width, base=base, scaling=scaling, turned=turned)


def rotary_frequencies(width: int, *, base: float, scaling: AnyScaling | None = None) -> Tensor:
    """Return the angles from one place to the next, float32 (width / 2,)."""
    waves = base ** (torch.arange(0, width, 2).float() / width)
    match scaling:
        case None:
            return 1.0 / waves
        case LinearScaling():
            return 1.0 / waves / scaling.factor
        case YarnScaling():
            return _stretch_by_turns(waves, base, scaling)
        case LongScaling():
            return 1.0 / (torch.tensor(scaling.factors) * waves)
        case RotaryScaling():
            return _stretch(1.0 / waves, scaling)


def _attention_factor(scaling: AnyScaling | None) -> float:
    """Return by how much cosines and sines are longer than 1."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0


def _stretch(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    turns = scaling.original_max_len / (2 * math.pi / frequencies)  # in the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slowed down whole, 1: not at all
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _stretch_by_turns(waves: Tensor, base: float, scaling: YarnScaling) -> Tensor:
    width = 2 * len(waves)

    def column(turns: float) -> float:
        """Return which number of a head makes so many turns in the original length."""
        length = scaling.original_max_len / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(base))

    first, last = column(scaling.beta_fast), column(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first if last != first else 0.001
    slowed = ((torch.arange(len(waves)).float() - first) / span).clamp(0, 1)  # 1: slowed down whole
    return 1.0 / (scaling.factor * waves) * slowed + 1.0 / waves * (1 - slowed)
