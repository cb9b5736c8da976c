"""BART: an encoder-decoder with norm last, learned positions, and a norm of its embeddings."""

from __future__ import annotations

from exporter.huggingface.bart_like import (
    BODY,
    UNUSED,
    BartLikeConfig,
    bart_like,
    bart_like_weights,
)
from exporter.huggingface.conversion import NameTable
from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.models.config import PositiveInt, TransformerConfig

POSITION_OFFSET = 2  # rows of the table of positions before the first place


class BartConfig(BartLikeConfig):
    """`config.json` of a BART."""

    vocab_size: PositiveInt = 50265


def _config(given: BartConfig, tokens: SpecialTokens) -> TransformerConfig:
    return bart_like(
        given,
        tokens,
        norm_position="last",
        embedding_norm=True,
        positions="learned",
        output_bias=True,
    )


def weights(config: TransformerConfig) -> NameTable:
    """Return where the weights of BART and mBART are."""
    return bart_like_weights(config, POSITION_OFFSET)


BART = Family(
    title="BART",
    model_types=("bart",),
    fields=BartConfig,
    to_config=_config,
    weights=weights,
    abilities=WRITES,
    body=BODY,
    ignored=UNUSED,
)
