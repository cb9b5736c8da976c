"""The methods that a model needs to be exported: a class of your own with them is taken as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeGuard

from torch import Tensor, nn

from exporter.models.attention import MultiHeadAttention
from exporter.models.cache import LayerCache
from exporter.models.config import TransformerConfig


class CachedDecoder(Protocol):
    """A decoder whose layers keep what they have seen."""

    cache_head_dim: int  # width of a head in the cache

    def hidden_states(
        self,
        input_ids: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Return what the head reads, (B, T, D).

        input_ids, position_ids int64 (B, T); memory (B, S, D); source_mask bool (B, S). With
        `caches`, one a layer, the ids are the newest of each row, and each cache holds them then.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., vocab_size) of hidden states (..., D)."""

    def logits_in_float32(self, hidden: Tensor) -> Tensor:
        """Return them as a graph gives them, in whatever type the weights are."""

    def cross_key_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of a source (B, S, D), as rows of its cache."""

    def attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield the attention of our blocks, whose heads are widened for the cache."""

    def cross_attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield those of them that attend to a source."""


class Generator(Protocol):
    """A model with a decoder, behind a source or not."""

    config: TransformerConfig

    @property
    def decoder(self) -> CachedDecoder:
        """The part that generates."""

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Tensor | None:
        """Return the memory (B, S, D) of sources; None if the model reads none."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all weights."""


def generator(model: nn.Module) -> Generator:
    """Return a model as a generator; TypeError if it has no decoder."""
    if not _is_generator(model):
        raise TypeError(f"{type(model).__name__} has no decoder, so that it generates nothing")
    return model


def _is_generator(model: nn.Module) -> TypeGuard[Generator]:
    return getattr(model, "decoder", None) is not None
