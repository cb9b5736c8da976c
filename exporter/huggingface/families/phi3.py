"""Phi-3: as Llama, with packed projections, LongRoPE and heads of which a part turns."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from exporter.huggingface.conversion import NameTable, packed_gates, packed_inputs
from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.huggingface.rope import RopeParameters
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
    turned_first,
    window_options,
)
from exporter.models.config import PositiveInt, TransformerConfig


class Phi3Rope(RopeParameters):
    """How positions turn; older files name LongRoPE "su" or "yarn"."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_longrope(cls, given: Any) -> Any:
        name = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
        return {**given, "rope_type": "longrope"} if name in ("su", "yarn") else given


class Phi3Config(RotaryDecoderConfig):
    """`config.json` of a Phi-3, 3.5 or 4."""

    turns_parts: ClassVar[bool] = True

    vocab_size: PositiveInt = 32064
    hidden_size: PositiveInt = 3072
    intermediate_size: PositiveInt = 8192
    max_position_embeddings: PositiveInt = 4096
    original_max_position_embeddings: PositiveInt | None = 4096
    norm_eps: float = Field(1e-5, alias="rms_norm_eps")
    sliding_window: PositiveInt | None = None
    rope_scaling: Phi3Rope | None = None
    rope_parameters: Phi3Rope | None = None


def _config(given: Phi3Config, tokens: SpecialTokens) -> TransformerConfig:
    return rotary_decoder_config(given, tokens, **window_options(given, given.sliding_window))


def _weights(config: TransformerConfig) -> NameTable:
    table = {
        **rotary_decoder_weights(config),
        **packed_inputs("decoder", "model.layers.{i}.self_attn.qkv_proj", config),
        **packed_gates("decoder", "model.layers.{i}.mlp.gate_up_proj", config),
    }
    return turned_first(config, table)


PHI3 = Family(
    title="Phi-3, Phi-3.5, Phi-4",
    model_types=("phi3",),
    fields=Phi3Config,
    to_config=_config,
    weights=_weights,
    abilities=WRITES,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
