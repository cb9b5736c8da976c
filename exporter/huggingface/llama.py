"""Converts Llama: rotary positions, mean-square norms first, gated feed-forward layers."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from exporter.huggingface.conversion import (
    ACTIVATIONS,
    Activation,
    Conversion,
    SourceConfig,
    SourceWeight,
    SpecialTokens,
    linear,
    norm,
    token_and_output,
)
from exporter.models.config import PositiveInt, Probability, RotaryScaling, TransformerConfig

_SCALING = {  # the fields of llama3, and our names of them
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_len",
}


class RopeParameters(BaseModel):
    """How positions turn; fields that other types have are those that are not named here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default", "llama3"] = "default"
    rope_theta: float | None = None
    partial_rotary_factor: Literal[1] = 1
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "type" in given:
            return {"rope_type": given["type"], **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        lacking = [name for name in _SCALING if getattr(self, name) is None]
        if self.rope_type == "llama3" and lacking:
            raise ValueError(f"rope_type llama3 needs {', '.join(lacking)}")
        return self

    def scaling(self) -> RotaryScaling | None:
        """Return the scaling in our terms, None for none."""
        if self.rope_type == "default":
            return None
        return RotaryScaling.model_validate(
            {ours: getattr(self, theirs) for theirs, ours in _SCALING.items()}
        )


class LlamaConfig(SourceConfig):
    """`config.json` of a Llama; older files have `rope_theta` and `rope_scaling` apart.

    pretraining_tp is not here: it changes only the order of a sum.
    """

    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    rope_interleaved: Literal[False] = False

    @property
    def rope(self) -> RopeParameters:
        """Return how positions turn, wherever it is written."""
        return self.rope_parameters or self.rope_scaling or RopeParameters()


def convert_llama(raw: dict[str, Any], tokens: SpecialTokens) -> Conversion:
    """Describe a Llama language model."""
    source = LlamaConfig.model_validate(raw)
    config = TransformerConfig(
        family="gpt",
        d_model=source.hidden_size,
        num_heads=source.num_attention_heads,
        num_kv_heads=source.num_key_value_heads,
        key_dim=source.head_dim,
        value_dim=source.head_dim,
        attention_bias=source.attention_bias,
        d_ff=source.intermediate_size,
        num_decoder_layers=source.num_hidden_layers,
        activation=ACTIVATIONS[source.hidden_act],
        gated_feed_forward=True,
        feed_forward_bias=source.mlp_bias,
        norm="rms",
        norm_position="first",
        norm_eps=source.rms_norm_eps,
        dropout=0.0,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_target_len=source.max_position_embeddings,
        positions="rotary",
        rotary_base=source.rope.rope_theta or source.rope_theta,
        rotary_scaling=source.rope.scaling(),
        scale_embeddings=False,
        tie_output=source.tie_word_embeddings,
        pad_token_id=tokens.pad or 0,
        eos_token_id=tokens.eos,
    )
    return Conversion(config, _weights(config), re.compile(r".*\.rotary_emb\.inv_freq"))


def _weights(config: TransformerConfig) -> dict[str, SourceWeight]:
    weights = {
        **token_and_output(_names("embed_tokens.weight"), tied=config.tie_output),
        **norm("decoder.final_norm", *_names("norm"), bias=False),
    }
    for i in range(config.num_decoder_layers):
        weights |= _layer(config, f"decoder.layers.{i}", f"layers.{i}")
    return weights


def _layer(config: TransformerConfig, ours: str, theirs: str) -> dict[str, SourceWeight]:
    weights: dict[str, SourceWeight] = {}
    for target, source in (
        ("self_attention_residual.norm", "input_layernorm"),
        ("feed_forward_residual.norm", "post_attention_layernorm"),
    ):
        weights |= norm(f"{ours}.{target}", *_names(f"{theirs}.{source}"), bias=False)
    attention_bias, mlp_bias = config.attention_bias, config.feed_forward_bias
    for target, source, bias in (
        ("self_attention.q_proj", "self_attn.q_proj", attention_bias),
        ("self_attention.k_proj", "self_attn.k_proj", attention_bias),
        ("self_attention.v_proj", "self_attn.v_proj", attention_bias),
        ("self_attention.out_proj", "self_attn.o_proj", attention_bias),
        ("feed_forward.gate_proj", "mlp.gate_proj", mlp_bias),
        ("feed_forward.up_proj", "mlp.up_proj", mlp_bias),
        ("feed_forward.down_proj", "mlp.down_proj", mlp_bias),
    ):
        weights |= linear(f"{ours}.{target}", *_names(f"{theirs}.{source}"), bias=bias)
    return weights


def _names(name: str) -> tuple[str, str]:
    """Return the two names of a weight: saved with the language model, or from the body alone."""
    return f"model.{name}", name
