"""Pegasus: an encoder-decoder with norm first and Marian's positions."""

from __future__ import annotations

from exporter.huggingface.bart_like import (
    BODY,
    COMPUTED_POSITIONS,
    BartLikeConfig,
    bart_like,
    bart_like_weights,
)
from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.models.config import PositiveInt, TransformerConfig


class PegasusConfig(BartLikeConfig):
    """`config.json` of a Pegasus."""

    vocab_size: PositiveInt = 50265


def _config(given: PegasusConfig, tokens: SpecialTokens) -> TransformerConfig:
    return bart_like(
        given,
        tokens,
        norm_position="first",
        positions="sinusoidal_halves",
        output_bias=True,
    )


PEGASUS = Family(
    title="Pegasus",
    model_types=("pegasus",),
    fields=PegasusConfig,
    to_config=_config,
    weights=bart_like_weights,
    abilities=WRITES,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
