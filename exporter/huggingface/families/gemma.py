"""Gemma 2 and 3: norms on both sides, stored without their 1, windows in most layers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from exporter.huggingface.conversion import NameTable, PlusOne, layers, modules
from exporter.huggingface.family import ACTIVATIONS, WRITES, Activation, Family, SpecialTokens
from exporter.huggingface.layered import LayeredConfig, LayeredRopeConfig
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
    window_options,
)
from exporter.models.config import PositiveInt, TransformerConfig


class Gemma2Config(LayeredConfig, RotaryDecoderConfig):
    """`config.json` of a Gemma 2."""

    first_full: ClassVar[int] = -1  # the last of every pattern

    vocab_size: PositiveInt = 256000
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: PositiveInt = 26
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    hidden_activation: Activation | None = "gelu_pytorch_tanh"
    max_position_embeddings: PositiveInt = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: PositiveInt = 256
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt = 2
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0
    use_bidirectional_attention: Literal[False] | None = None


class Gemma3Config(LayeredRopeConfig, Gemma2Config):
    """`config.json` of the text model of a Gemma 3."""

    vocab_size: PositiveInt = 262208
    max_position_embeddings: PositiveInt = 131072
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt = 6
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: None = None  # which transformers does not apply
    rope_theta: float = 1_000_000.0


def _differences(given: Gemma2Config) -> dict[str, Any]:
    return {
        "attention_bias": given.attention_bias,
        "attention_scale": given.query_pre_attn_scalar**-0.5,
        "attention_softcap": given.attn_logit_softcapping,
        "logit_softcap": given.final_logit_softcapping,
        "activation": ACTIVATIONS[given.hidden_activation or "gelu_pytorch_tanh"],
        "norm_position": "both",
        "scale_embeddings": True,
    }


def _config_of_2(given: Gemma2Config, tokens: SpecialTokens) -> TransformerConfig:
    windows = window_options(given, given.sliding_window, given.types)
    return rotary_decoder_config(given, tokens, **_differences(given), **windows)


def _config_of_3(given: Gemma3Config, tokens: SpecialTokens) -> TransformerConfig:
    windows = given.local_options(given.sliding_window)
    return rotary_decoder_config(given, tokens, **_differences(given), **windows, qk_norm=True)


def _weights(config: TransformerConfig) -> NameTable:
    norms = {
        **modules({"decoder.final_norm": "model.norm"}, PlusOne()),
        **layers(
            "decoder",
            "model.layers",
            PlusOne(),
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
    fields=Gemma2Config,
    to_config=_config_of_2,
    weights=_weights,
    abilities=WRITES,
    body="model.",
)
GEMMA3 = Family(
    title="Gemma 3, text",
    model_types=("gemma3_text",),
    fields=Gemma3Config,
    to_config=_config_of_3,
    weights=_weights,
    abilities=WRITES,
    body="model.",
)
