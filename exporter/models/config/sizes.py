"""Sizes of a model, which all groups of its options refer to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from engine.package.manifest import MAX_HEADS, MAX_LAYERS, MAX_LENGTH, MAX_VOCAB_SIZE, MAX_WIDTH
from exporter.models.config.checked import CheckedOptions, Checks

Family = Literal["encoder-decoder", "gpt", "bert", "labeller", "vit"]
NumLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
NumHeads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Length = Annotated[int, Field(ge=0, le=MAX_LENGTH)]
VocabSize = Annotated[int, Field(ge=0, le=MAX_VOCAB_SIZE)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
Probability = Annotated[float, Field(ge=0, lt=1)]

PositiveFloat = Annotated[float, Field(gt=0)]

WITH_DECODER: tuple[Family, ...] = ("encoder-decoder", "gpt")


class SizeOptions(CheckedOptions):
    """The options that every family has."""

    family: Family
    d_model: Width
    num_heads: NumHeads
    num_kv_heads: NumHeads | None = None  # grouped queries: gpt; None: num_heads
    d_ff: Width
    num_encoder_layers: NumLayers = 0
    num_decoder_layers: NumLayers = 0

    @property
    def size_checks(self) -> Checks:
        """The rules between family and number of layers."""
        return (self._check_layers,)

    def _check_layers(self) -> Iterator[str]:
        needs_encoder, needs_decoder = self.family != "gpt", self.family in WITH_DECODER
        has_encoder, has_decoder = self.num_encoder_layers > 0, self.num_decoder_layers > 0
        if (has_encoder, has_decoder) != (needs_encoder, needs_decoder):
            yield (
                f"{self.family} has {'' if needs_encoder else 'no '}encoder layers and "
                f"{'' if needs_decoder else 'no '}decoder layers, got num_encoder_layers "
                f"{self.num_encoder_layers} and num_decoder_layers {self.num_decoder_layers}"
            )
