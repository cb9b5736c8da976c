"""Llama, and what differs from it in the decoders that came after."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from exporter.huggingface.conversion import NameTable, packed_gates, packed_inputs
from exporter.huggingface.family import Family
from exporter.huggingface.stacks.rotary_decoder import (
    ROTARY,
    ROTARY_FIXED,
    length_notes,
    rotary,
    rotary_decoder_weights,
    turned_first,
    windowed,
)
from exporter.models.config import TransformerConfig

LLAMA = Family(
    title="Llama 2 and 3, TinyLlama, SmolLM",
    model_types=("llama",),
    fixed=ROTARY_FIXED,
    options={**ROTARY, "attention.bias": "attention_bias", "feed_forward.bias": "mlp_bias"},
    computed=rotary,
    supported={"rope_interleaved": (False, None)},
    notes=length_notes,
    weights=rotary_decoder_weights,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
# A window in every layer, in the first version.
MISTRAL = replace(
    LLAMA,
    title="Mistral",
    model_types=("mistral",),
    options=ROTARY,
    computed=windowed,
    supported={"layer_types": (None,)},
)
# Biases of queries, keys and values, or norms of them.
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


def _phi3_weights(config: TransformerConfig) -> NameTable:
    """Return where projections are packed, in heads of which a part turns."""
    table = {
        **rotary_decoder_weights(config),
        **packed_inputs("decoder", "model.layers.{i}.self_attn.qkv_proj", config),
        **packed_gates("decoder", "model.layers.{i}.mlp.gate_up_proj", config),
    }
    return turned_first(config, table)


PHI3 = replace(
    LLAMA,
    title="Phi-3, Phi-3.5, Phi-4",
    model_types=("phi3",),
    options=ROTARY,
    computed=partial(windowed, turns_parts=True),
    supported={},
    weights=_phi3_weights,
)
