"""The ways in which a model tells places apart: vectors that are added, turns, and biases."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import RotaryScaling, TransformerConfig
from exporter.operators.heads import rotate

INIT_STD = 0.02  # embeddings that are not scaled, as in BERT and GPT

Layout = Literal["sinusoidal", "sinusoidal_halves", "sinusoidal_tensor2tensor"]


def _check_length(length: int, max_len: int) -> None:
    """Raise ValueError for a sequence that a table has no places for, unless a graph is traced."""
    if not torch.compiler.is_exporting() and length > max_len:
        raise ValueError(
            f"a sequence of {length} positions is longer than the {max_len} of this model; "
            "shorten it or build the model with a larger limit"
        )


class Positions(nn.Module, ABC):
    """A vector for each place up to a limit, which is added to that of a token."""

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The vectors (max_len, width)."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return the positions (..., width) of int64 `position_ids` (...)."""
        if not torch.compiler.is_exporting() and position_ids.numel():
            _check_length(int(position_ids.max()) + 1, len(self.rows))
        return self.rows[position_ids]

    def first(self, length: int) -> Tensor:
        """Return the first positions, (length, width)."""
        _check_length(length, len(self.rows))
        return self.rows[:length]


class LearnedPositions(Positions):
    """Trained vectors."""

    def __init__(self, max_len: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_len, width))
        nn.init.normal_(self.weight, std=INIT_STD)

    @property
    def rows(self) -> Tensor:
        """The vectors (max_len, width)."""
        return self.weight


class SinusoidalPositions(Positions):
    """Computed vectors.

    The first place has the number `offset`; numbers are rounded to `kept_in`. The first one may be
    zeros.
    """

    def __init__(
        self,
        max_len: int,
        width: int,
        *,
        layout: Layout = "sinusoidal",
        offset: int = 0,
        kept_in: torch.dtype = torch.float32,
        first_is_zeros: bool = False,
    ) -> None:
        super().__init__()
        table = sinusoidal_table(offset + max_len, width, layout)[offset:]
        table[:first_is_zeros] = 0.0
        self.table: Tensor  # (max_len, width)
        self.register_buffer("table", table.to(kept_in).float(), persistent=False)

    @property
    def rows(self) -> Tensor:
        """The vectors (max_len, width)."""
        return self.table


def sinusoidal_table(length: int, width: int, layout: Layout = "sinusoidal") -> Tensor:
    """Return positions of section 3.5 of Vaswani et al. 2017, float32 (length, width).

    Even columns are sines, odd columns cosines; an odd width ends with a sine. In "halves" all
    sines come first, then all cosines; so in "tensor2tensor", where moreover the last wave is the
    slowest that the paper names, angles are rounded to float32 and an odd width ends with zeros.
    """
    if layout == "sinusoidal_tensor2tensor":
        return _tensor2tensor_table(length, width)
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = positions * 10000.0**-exponents  # (length, ceil(width / 2))
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width].float()
    if layout == "sinusoidal":
        return table
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


def _tensor2tensor_table(length: int, width: int) -> Tensor:
    num_waves = width // 2
    step = math.log(10000) / max(num_waves - 1, 1)
    frequencies = torch.exp(torch.arange(num_waves).float() * -step)
    angles = torch.arange(length).float()[:, None] * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


def make_positions(
    config: TransformerConfig, max_len: int, *, one_before: bool = False
) -> Positions | None:
    """Return the positions that are added to embeddings; None if attention knows them instead.

    `one_before`: with the place before the first, which is of no position where they are computed.
    """
    if config.positions.kind == "rotary" or config.positions.kind == "relative":
        return None
    if config.positions.kind == "learned":
        return LearnedPositions(max_len + one_before, config.d_model)
    return SinusoidalPositions(
        max_len + one_before,
        config.d_model,
        layout=config.positions.kind,
        offset=config.positions.offset - one_before,
        kept_in=getattr(torch, config.positions.dtype),
        first_is_zeros=one_before,
    )


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021): queries and keys are turned by an angle for their place.

    Cosines and sines are of every place up to a limit; column i turns i and i + width / 2.

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
        length = heads.shape[2]
        _check_length(length, self.cos.shape[0])
        return rotate(heads, self.cos[:length], self.sin[:length])


def make_rotary(config: TransformerConfig, max_len: int) -> RotaryPositions | None:
    """Return the rotary positions of a model, None if it has others."""
    if config.positions.kind != "rotary":
        return None
    base, scaling = config.positions.rotary_base, config.positions.rotary_scaling
    return _rotary(config, max_len, base, scaling)


def make_local_rotary(config: TransformerConfig, max_len: int) -> RotaryPositions | None:
    """Return the rotary positions of layers with a window, None if they are those of all."""
    if config.positions.local_rotary_base is None:
        return None
    return _rotary(config, max_len, config.positions.local_rotary_base, None)


def _rotary(
    config: TransformerConfig, max_len: int, base: float, scaling: RotaryScaling | None
) -> RotaryPositions:
    width, turned = config.head_key_dim, config.turned_dim
    return RotaryPositions(max_len, width, base=base, scaling=scaling, turned=turned)


class RelativePositions(nn.Module):
    """Relative positions (Raffel et al. 2020): distances of key and query bias their scores.

    The bias of each head and bucket of distances is learned, one for all layers of a stack.

    With `causal` keys stand at or before their query; else half of the buckets are for those
    behind it.
    """

    def __init__(self, config: TransformerConfig, max_len: int, *, causal: bool) -> None:
        super().__init__()
        self.max_len = max_len
        self.causal = causal
        num_buckets = config.positions.relative_buckets
        self.weight = nn.Parameter(torch.empty(num_buckets, config.num_heads))
        nn.init.normal_(self.weight, std=config.d_model**-0.5)
        places = torch.arange(0 if causal else 1 - max_len, max_len)  # a query's, behind its key
        self.buckets: Tensor  # int64 (max_len,), with both sides (2 * max_len - 1,)
        buckets = relative_buckets(
            places, num_buckets, config.positions.relative_max_distance, both_sides=not causal
        )
        self.register_buffer("buckets", buckets, persistent=False)
        # Sliced, for a Range of open length is computed on the CPU beside a device.
        self.places: Tensor  # int64 (max_len,)
        self.register_buffer("places", torch.arange(max_len), persistent=False)

    def by_distance(self) -> Tensor:
        """Return the bias for each distance from a key on to its query, (max_len, num_heads)."""
        return self.weight[self.buckets]

    def between(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the bias of scores whose places count from 0, (1, num_heads, T, S)."""
        _check_length(max(num_queries, num_keys), self.max_len)
        distances = self.places[:num_queries, None] - self.places[:num_keys]  # (T, S)
        index = distances.clamp(min=0) if self.causal else distances + self.max_len - 1
        return self.weight[self.buckets[index]].permute(2, 0, 1)[None]


def make_relative(
    config: TransformerConfig, max_len: int, *, causal: bool
) -> RelativePositions | None:
    """Return the relative positions of a stack, None if the model has others."""
    if config.positions.kind != "relative":
        return None
    return RelativePositions(config, max_len, causal=causal)


def relative_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, *, both_sides: bool
) -> Tensor:
    """Return the bucket of each distance (int64) from a key on to its query, of the same shape.

    Half of them are for a distance each, the others grow with its logarithm, which is rounded as
    in the models that were published: in float32.
    """
    first = torch.zeros_like(distances)
    if both_sides:
        num_buckets //= 2
        first = torch.where(distances < 0, num_buckets, 0)
        distances = distances.abs()
    else:
        distances = distances.clamp(min=0)
    num_exact = num_buckets // 2
    share = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    grown = num_exact + (share * (num_buckets - num_exact)).clamp(min=0).long()
    return first + torch.where(distances < num_exact, distances, grown.clamp(max=num_buckets - 1))
