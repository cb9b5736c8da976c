"""Gemma 2 and 3: norms on both sides, stored without their 1, windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.conversion import PLUS_ONE, NameTable, layers, modules
from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.rotary_decoder import (
    ROTARY,
    ROTARY_FIXED,
    local_options,
    rotary,
    rotary_decoder_weights,
    windowed,
)
from exporter.models.config import TransformerConfig


def _computed_of_2(original: Original) -> Options:
    scale = original.config.query_pre_attn_scalar**-0.5
    return {**windowed(original), "attention.scale": scale}


def _computed_of_3(original: Original) -> Options:
    rope, windows = local_options(original, original.config.sliding_window)
    scale = original.config.query_pre_attn_scalar**-0.5
    return {**rotary(original, rope), **windows, "attention.scale": scale}


def _weights(config: TransformerConfig) -> NameTable:
    norms = {
        **modules({"decoder.final_norm": "model.norm"}, PLUS_ONE),
        **layers(
            "decoder",
            "model.layers",
            PLUS_ONE,
            query_norm="self_attn.q_norm",
            key_norm="self_attn.k_norm",
            attention_norm="input_layernorm",
            attention_output_norm="post_attention_layernorm",
            feed_forward_norm="pre_feedforward_layernorm",
            feed_forward_output_norm="post_feedforward_layernorm",
        ),
    }
    return {**rotary_decoder_weights(config), **norms}


GEMMA2 = Family(
    title="Gemma 2",
    model_types=("gemma2",),
    fixed={**ROTARY_FIXED, "norm_position": "both", "scale_embeddings": True},
    options={
        **ROTARY,
        "attention.bias": "attention_bias",
        "feed_forward.activation": "hidden_activation",
        "attention.softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    computed=_computed_of_2,
    supported={"use_bidirectional_attention": (None, False)},
    weights=_weights,
    body="model.",
)
GEMMA3 = replace(
    GEMMA2,
    title="Gemma 3, text",
    model_types=("gemma3_text",),
    fixed={**GEMMA2.fixed, "attention.qk_norm": True},
    computed=_computed_of_3,
    # Transformers does not apply the first.
    supported={"attn_logit_softcapping": (None,), **GEMMA2.supported},
)
