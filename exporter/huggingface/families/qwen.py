"""Qwen 2 and 3: as Llama, with biases of queries, keys and values, or with norms of them."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.families.llama import LLAMA
from exporter.huggingface.stacks.rotary_decoder import ROTARY, ROTARY_FIXED, windowed

QWEN2 = replace(
    LLAMA,
    title="Qwen 2 and 2.5",
    model_types=("qwen2",),
    fixed={**ROTARY_FIXED, "attention.bias": True, "attention.output_bias": False},
    options=ROTARY,
    computed=windowed,
    supported={},
)
QWEN3 = replace(
    QWEN2,
    title="Qwen 3",
    model_types=("qwen3",),
    fixed={**ROTARY_FIXED, "attention.qk_norm": True},
    options={**ROTARY, "attention.bias": "attention_bias"},
    ignored="",
)
