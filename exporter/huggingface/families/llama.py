"""Llama: rotary positions, mean-square norms first, gated feed-forward layers."""

from __future__ import annotations

from exporter.huggingface.family import WRITES, Family
from exporter.huggingface.stacks.rotary_decoder import (
    ROTARY,
    ROTARY_FIXED,
    length_notes,
    rotary,
    rotary_decoder_weights,
)

LLAMA = Family(
    title="Llama 2 and 3, TinyLlama, SmolLM",
    model_types=("llama",),
    fixed=ROTARY_FIXED,
    options={**ROTARY, "attention.bias": "attention_bias", "feed_forward.bias": "mlp_bias"},
    computed=rotary,
    supported={"rope_interleaved": (False, None)},
    notes=length_notes,
    weights=rotary_decoder_weights,
    abilities=WRITES,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
