"""M2M-100 and NLLB: norm first, positions as in tensor2tensor, languages told by tokens."""

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
    computed=_computed,
    weights=bart_like_weights,
    abilities=WRITES,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
