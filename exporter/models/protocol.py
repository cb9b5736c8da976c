"""What is asked of a model that writes: a class of your own that answers is exported as ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.layers import Decoder
from exporter.models.own import OwnDecoder


class Generator(Protocol):
    """A model with a decoder, behind a source or not."""

    config: TransformerConfig
    decoder: Decoder | OwnDecoder

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Tensor | None:
        """Return the memory (B, S, D) of sources; None if the model reads none."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all weights."""


def generator(model: nn.Module) -> Generator:
    """Return a model as one that writes; TypeError if it has no decoder."""
    if getattr(model, "decoder", None) is None:
        raise TypeError(f"{type(model).__name__} has no decoder, so that it writes nothing")
    return cast(Generator, model)
