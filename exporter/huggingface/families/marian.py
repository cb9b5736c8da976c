"""Marian: an encoder-decoder with norm last, whose embeddings are shared or each side's own."""

from __future__ import annotations

from exporter.huggingface.family import WRITES, Family, Options, Original
from exporter.huggingface.stacks.bart_like import (
    BART_LIKE,
    BODY,
    COMPUTED_POSITIONS,
    bart_like,
    bart_like_weights,
)


def _computed(original: Original) -> Options:
    config = original.config
    is_other = config.decoder_vocab_size != config.vocab_size
    return {
        **bart_like(original, start=original.tokens.pad),
        "source_vocab_size": config.vocab_size if is_other else None,
    }


MARIAN = Family(
    title="Marian (OPUS-MT)",
    model_types=("marian",),
    fixed={
        "architecture": "encoder-decoder",
        "norm_position": "last",
        "positions.kind": "sinusoidal_halves",
        "output_bias": True,
    },
    options={
        **BART_LIKE,
        "vocab_size": "decoder_vocab_size",
        "share_embeddings": "share_encoder_decoder_embeddings",
    },
    computed=_computed,
    weights=bart_like_weights,
    abilities=WRITES,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
