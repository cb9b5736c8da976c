"""Qwen 2 and 3: as Llama, with biases of queries, keys and values, or with norms of them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.huggingface.layered import check_layer_types
from exporter.huggingface.rope import LayerType
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
    window_options,
)
from exporter.models.config import PositiveInt, TransformerConfig


class Qwen2Config(RotaryDecoderConfig):
    """`config.json` of a Qwen 2."""

    vocab_size: PositiveInt = 151936
    intermediate_size: PositiveInt = 22016
    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32768
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[LayerType, ...] | None = None

    @model_validator(mode="after")
    def _check_layer_types(self) -> Self:
        check_layer_types(self.layer_types, self.num_hidden_layers)
        return self

    def windows(self) -> dict[str, Any]:
        """Return the options of the layers that have a window: without types, the last ones."""
        if not self.use_sliding_window:
            return {}
        first = self.max_window_layers
        types = self.layer_types or tuple[LayerType, ...](
            "sliding_attention" if i >= first else "full_attention"
            for i in range(self.num_hidden_layers)
        )
        return window_options(self, self.sliding_window, types)


class Qwen3Config(Qwen2Config):
    """`config.json` of a Qwen 3."""

    head_dim: PositiveInt | None = 128
    attention_bias: bool = False


def _config_of_2(given: Qwen2Config, tokens: SpecialTokens) -> TransformerConfig:
    biases = {"attention_bias": True, "attention_output_bias": False}
    return rotary_decoder_config(given, tokens, **biases, **given.windows())


def _config_of_3(given: Qwen3Config, tokens: SpecialTokens) -> TransformerConfig:
    norms = {"attention_bias": given.attention_bias, "qk_norm": True}
    return rotary_decoder_config(given, tokens, **norms, **given.windows())


QWEN2 = Family(
    title="Qwen 2 and 2.5",
    model_types=("qwen2",),
    fields=Qwen2Config,
    to_config=_config_of_2,
    weights=rotary_decoder_weights,
    abilities=WRITES,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
QWEN3 = Family(
    title="Qwen 3",
    model_types=("qwen3",),
    fields=Qwen3Config,
    to_config=_config_of_3,
    weights=rotary_decoder_weights,
    abilities=WRITES,
    body="model.",
)
