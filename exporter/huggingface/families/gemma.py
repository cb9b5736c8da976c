"""Gemma 2 and 3: norms on both sides, stored without their 1, windows in most layers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from exporter.huggingface.conversion import NameTable, PlusOne, modules
from exporter.huggingface.family import ACTIVATIONS, Activation, Family, SpecialTokens
from exporter.huggingface.rope import RopeParameters
from exporter.huggingface.rotary_decoder import (
    LAYER,
    LayerType,
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
    sliding,
    window_options,
)
from exporter.models.config import PositiveInt, TransformerConfig


class Gemma2Config(RotaryDecoderConfig):
    """`config.json` of a Gemma 2."""

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
    sliding_window_pattern: PositiveInt = 2  # every so many-th layer sees all
    layer_types: tuple[LayerType, ...] | None = None
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0
    use_bidirectional_attention: Literal[False] | None = None

    @property
    def types(self) -> tuple[LayerType, ...]:
        """Return which layers have a window."""
        return self.layer_types or tuple(
            "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"
            for i in range(self.num_hidden_layers)
        )


class LayeredRope(RopeParameters):
    """How positions turn in each kind of layer; in older files only for those that see all."""

    full_attention: RopeParameters | None = None
    sliding_attention: RopeParameters | None = None

    @model_validator(mode="after")
    def _check_local(self) -> Self:
        local = self.sliding_attention
        if local is not None and local.rope_type != "default":
            raise ValueError(
                f"rope_type of sliding_attention is {local.rope_type}; supported: default"
            )
        return self


class Gemma3Config(Gemma2Config):
    """`config.json` of the text model of a Gemma 3."""

    vocab_size: PositiveInt = 262208
    max_position_embeddings: PositiveInt = 131072
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt = 6
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rope_parameters: LayeredRope | None = None

    @property
    def rope(self) -> RopeParameters:
        """Return how positions turn in layers that see all."""
        layered = self.rope_parameters and self.rope_parameters.full_attention
        return layered or self.rope_scaling or RopeParameters()

    @property
    def local_base(self) -> float:
        """Return the base of the other layers, where nothing is stretched."""
        layered = self.rope_parameters and self.rope_parameters.sliding_attention
        return (layered and layered.rope_theta) or self.rope_local_base_freq


def _differences(source: Gemma2Config) -> dict[str, Any]:
    return {
        "attention_bias": source.attention_bias,
        "attention_scale": source.query_pre_attn_scalar**-0.5,
        "attention_softcap": source.attn_logit_softcapping,
        "logit_softcap": source.final_logit_softcapping,
        "activation": ACTIVATIONS[source.hidden_activation or "gelu_pytorch_tanh"],
        "norm_position": "both",
        "scale_embeddings": True,
    }


def _config_of_2(source: Gemma2Config, tokens: SpecialTokens) -> TransformerConfig:
    windows = window_options(source, source.sliding_window, source.types)
    return rotary_decoder_config(source, tokens, **_differences(source), **windows)


def _config_of_3(source: Gemma3Config, tokens: SpecialTokens) -> TransformerConfig:
    windows = {
        "window": source.sliding_window,
        "windowed_layers": sliding(source.types),
        "local_rotary_base": source.local_base,
        "qk_norm": True,
    }
    return rotary_decoder_config(source, tokens, **_differences(source), **windows)


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = LAYER
    norms = {
        "decoder.final_norm": "model.norm",
        f"{ours}.self_attention_residual.norm": f"{theirs}.input_layernorm",
        f"{ours}.self_attention_residual.output_norm": f"{theirs}.post_attention_layernorm",
        f"{ours}.feed_forward_residual.norm": f"{theirs}.pre_feedforward_layernorm",
        f"{ours}.feed_forward_residual.output_norm": f"{theirs}.post_feedforward_layernorm",
        f"{ours}.self_attention.q_norm": f"{theirs}.self_attn.q_norm",
        f"{ours}.self_attention.k_norm": f"{theirs}.self_attn.k_norm",
    }
    return {**rotary_decoder_weights(config), **modules(norms, PlusOne())}


GEMMA2 = Family(
    title="Gemma 2",
    model_types=("gemma2",),
    source=Gemma2Config,
    to_config=_config_of_2,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    needs=("window", "attention_softcap"),
    body="model.",
)
GEMMA3 = Family(
    title="Gemma 3, text",
    model_types=("gemma3_text",),
    source=Gemma3Config,
    to_config=_config_of_3,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    needs=("window",),
    body="model.",
)
