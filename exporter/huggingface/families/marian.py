"""Marian, Pegasus and M2M-100: encoder-decoders with computed positions."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.family import Family, Options, Original
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
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
PEGASUS = replace(
    MARIAN,
    title="Pegasus",
    model_types=("pegasus",),
    fixed={**MARIAN.fixed, "norm_position": "first"},
    options=BART_LIKE,
    computed=bart_like,
)


def _computed_places(original: Original) -> Options:
    padding = original.config.pad_token_id or 0
    # fairseq counts from there, and no padding
    places = {"positions.offset": padding + 1, "uncounted_token_id": padding}
    return {**bart_like(original), **places}


M2M_100 = Family(
    title="M2M-100, NLLB",
    model_types=("m2m_100",),
    fixed={
        "architecture": "encoder-decoder",
        "norm_position": "first",
        "positions.kind": "sinusoidal_tensor2tensor",
    },
    options=BART_LIKE,
    computed=_computed_places,
    weights=bart_like_weights,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
