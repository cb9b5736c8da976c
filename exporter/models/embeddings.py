"""The input of the first layer: token embeddings plus positions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import TransformerConfig

INIT_STD = 0.02  # embeddings that are not scaled, as in BERT and GPT


Layout = Literal["sinusoidal", "sinusoidal_halves", "sinusoidal_tensor2tensor"]


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


class SinusoidalPositions(nn.Module):
    """Fixed positions, for any length: the table grows when a longer sequence comes.

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
        self.first_is_zeros = first_is_zeros
        self.layout: Layout = layout
        self.offset = offset
        self.kept_in = kept_in
        self.table: Tensor  # (max_len, width)
        self.register_buffer("table", self._make(max_len, width), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return the positions (..., width) of int64 `position_ids` (...)."""
        # In a graph the table is a constant, as long as the longest sequence it was made for.
        if not torch.compiler.is_exporting() and position_ids.numel():
            self._grow(int(position_ids.max()) + 1)
        return self.table[position_ids]

    def first(self, length: int) -> Tensor:
        """Return the first positions, (length, width)."""
        if not torch.compiler.is_exporting():
            self._grow(length)
        return self.table[:length]

    def _grow(self, length: int) -> None:
        if length > self.table.shape[0]:
            self.table = self._make(length, self.table.shape[1]).to(self.table)

    def _make(self, length: int, width: int) -> Tensor:
        table = sinusoidal_table(self.offset + length, width, self.layout)[self.offset :]
        table[: self.first_is_zeros] = 0.0
        return table.to(self.kept_in).float()


class LearnedPositions(nn.Module):
    """A trained vector for each position up to a limit."""

    def __init__(self, max_len: int, width: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, width))
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return the positions (..., width) of int64 `position_ids` (...)."""
        if not torch.compiler.is_exporting() and position_ids.numel():
            self._check(int(position_ids.max()) + 1)
        return self.weight[position_ids]

    def first(self, length: int) -> Tensor:
        """Return the first positions, (length, width)."""
        if not torch.compiler.is_exporting():
            self._check(length)
        return self.weight[:length]

    def _check(self, length: int) -> None:
        if length > self.max_len:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {self.max_len} that this "
                "model has learned; shorten it or train with a larger limit"
            )


Positions = SinusoidalPositions | LearnedPositions


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


def make_token_embedding(config: TransformerConfig, vocab_size: int) -> nn.Embedding:
    """Return token vectors [vocab_size, d_model], drawn so that they have unit size when scaled.

    They are as wide as `token_dim` where there is one.
    """
    embedding = nn.Embedding(vocab_size, config.token_dim or config.d_model)
    std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
    nn.init.normal_(embedding.weight, std=std)
    return embedding


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return a norm over the width of the model: of mean and variance, or of the mean square."""
    if config.norm == "rms":
        kind = NarrowingRMSNorm if config.feed_forward.float32_output else nn.RMSNorm
        return kind(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.norm_bias)


class NarrowingRMSNorm(nn.RMSNorm):
    """A norm of the mean square that gives its weights' type, whatever the type that it reads."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., d_model) to the same shape."""
        if hidden.dtype == self.weight.dtype:
            return super().forward(hidden)
        weight = self.weight.to(hidden.dtype)
        normed = F.rms_norm(hidden, self.normalized_shape, weight, self.eps)
        return normed.to(self.weight.dtype)


class Embeddings(nn.Module):
    """Token embeddings, scaled by sqrt(d_model) or not, plus positions (plus token types).

    Positions may leave a token out of their count, which has the place before the first.
    """

    def __init__(
        self,
        config: TransformerConfig,
        max_len: int,
        token: nn.Embedding | None = None,
        *,
        uncounted: int | None = None,
    ) -> None:
        super().__init__()
        if token is None:
            token = make_token_embedding(config, config.vocab_size)
        self.token = token
        self.token_in: nn.Module = nn.Identity()
        if config.token_dim is not None:
            self.token_in = nn.Linear(config.token_dim, config.d_model, bias=False)
            nn.init.xavier_uniform_(self.token_in.weight)
        self.uncounted = uncounted
        self.positions = make_positions(config, max_len, one_before=uncounted is not None)
        self.token_type: nn.Embedding | None = None
        if config.num_token_types:
            self.token_type = nn.Embedding(config.num_token_types, config.d_model)
            nn.init.normal_(self.token_type.weight, std=INIT_STD)
        self.norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.d_model**0.5 if config.scale_embeddings else 1.0

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return (B, S, d_model) for int64 ids (B, S); positions count from 0 if not given."""
        hidden = self.token_in(self.token(input_ids)) * self.scale
        if self.uncounted is not None:
            is_counted = (input_ids != self.uncounted).long()
            position_ids = is_counted.cumsum(dim=1) * is_counted  # 0: the place before the first
        if self.positions is not None:
            if position_ids is None:
                hidden = hidden + self.positions.first(input_ids.shape[1])
            else:
                hidden = hidden + self.positions(position_ids)
        if self.token_type is not None:
            if token_type_ids is None:
                hidden = hidden + self.token_type.weight[0]
            else:
                hidden = hidden + self.token_type(token_type_ids)
        output: Tensor = self.dropout(self.norm(hidden))
        return output
