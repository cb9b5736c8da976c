"""BART: an encoder-decoder with norm last, learned positions, and a norm of its embeddings."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable
from exporter.huggingface.family import WRITES, Family
from exporter.huggingface.stacks.bart_like import (
    BART_LIKE,
    BODY,
    UNUSED,
    bart_like,
    bart_like_weights,
)
from exporter.models.config import TransformerConfig

_POSITION_OFFSET = 2  # rows of the table of positions before the first place


def _weights(config: TransformerConfig) -> NameTable:
    return bart_like_weights(config, _POSITION_OFFSET)


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
    weights=_weights,
    abilities=WRITES,
    body=BODY,
    ignored=UNUSED,
)
