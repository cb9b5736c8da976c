"""BART and mBART: encoder-decoders with learned positions and a norm of their embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.bart_like import (
    BART_LIKE,
    BODY,
    UNUSED,
    bart_like,
    bart_like_weights,
)

BART = Family(
    title="BART",
    model_types=("bart",),
    fixed={
        "architecture": "encoder-decoder",
        "norm_position": "last",
        "embedding_norm": True,
        "positions.kind": "learned",
        "output_bias": True,
    },
    options=BART_LIKE,
    computed=bart_like,
    weights=partial(bart_like_weights, position_offset=2),
    body=BODY,
    ignored=UNUSED,
)


def _computed(original: Original) -> Options:
    return bart_like(original, start=original.tokens.eos)


def _notes(original: Original) -> list[str]:
    """Say what outputs begin behind, where the original does not."""
    if original.said.get("decoder_start_token_id") is not None:
        return []
    return [
        "config.json has no decoder_start_token_id: outputs begin behind the end token, or "
        "behind the token of --target-lang"
    ]


MBART = replace(
    BART,
    title="mBART",
    model_types=("mbart",),
    fixed={**BART.fixed, "norm_position": "first"},
    computed=_computed,
    notes=_notes,
)
