"""Rotary positions (Su et al. 2021): queries and keys are turned by an angle for their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import RotaryScaling, TransformerConfig
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
        scaling: RotaryScaling | None = None,
        turned: int | None = None,
    ) -> None:
        """`turned` numbers of a head turn, the first of each half; None: all."""
        super().__init__()
        self.cos: Tensor  # (max_len, width / 2)
        self.sin: Tensor  # (max_len, width / 2)
        turned, factor = turned or width, 1.0
        frequencies = 1.0 / base ** (torch.arange(0, turned, 2).float() / turned)
        if scaling is not None:
            frequencies, factor = torch.tensor(scaling.frequencies), scaling.attention_factor
        angles = torch.arange(max_len).float()[:, None] * frequencies
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
    config: TransformerConfig, max_len: int, base: float, scaling: RotaryScaling | None
) -> RotaryPositions:
    width, turned = config.head_key_dim, config.turned_dim
    return RotaryPositions(max_len, width, base=base, scaling=scaling, turned=turned)
