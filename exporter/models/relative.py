"""Relative positions (Raffel et al. 2020): scores are biased by how far key and query are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from exporter.models.config import TransformerConfig


class RelativePositions(nn.Module):
    """A learned bias for each head and bucket of distances, one for all layers of a stack.

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
        length = max(num_queries, num_keys)
        if not torch.compiler.is_exporting() and length > self.max_len:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {self.max_len} of this "
                "model; shorten it or build the model with a larger limit"
            )
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
