"""Phi-3: as Llama, with packed projections, LongRoPE and heads of which a part turns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from exporter.huggingface.conversion import NameTable, packed_gates, packed_inputs
from exporter.huggingface.families.llama import LLAMA
from exporter.huggingface.stacks.rotary_decoder import (
    ROTARY,
    rotary_decoder_weights,
    turned_first,
    windowed,
)
from exporter.models.config import TransformerConfig


def _weights(config: TransformerConfig) -> NameTable:
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
    weights=_weights,
)
