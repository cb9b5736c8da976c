"""Mistral: as Llama, with grouped heads and, in the first version, a window in every layer."""

from __future__ import annotations

from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
    window_options,
)
from exporter.models.config import PositiveInt, TransformerConfig


class MistralConfig(RotaryDecoderConfig):
    """`config.json` of a Mistral."""

    vocab_size: PositiveInt = 32000
    intermediate_size: PositiveInt = 14336
    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 4096 * 32
    sliding_window: PositiveInt | None = 4096
    layer_types: None = None


def _config(given: MistralConfig, tokens: SpecialTokens) -> TransformerConfig:
    return rotary_decoder_config(given, tokens, **window_options(given, given.sliding_window))


MISTRAL = Family(
    title="Mistral",
    model_types=("mistral",),
    fields=MistralConfig,
    to_config=_config,
    weights=rotary_decoder_weights,
    abilities=WRITES,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
