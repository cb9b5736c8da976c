"""Llama: rotary positions, mean-square norms first, gated feed-forward layers."""

from __future__ import annotations

from typing import Literal

from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    rotary_decoder_weights,
)
from exporter.models.config import PositiveInt, TransformerConfig


class LlamaConfig(RotaryDecoderConfig):
    """`config.json` of a Llama.

    pretraining_tp is not here: it changes only the order of a sum.
    """

    vocab_size: PositiveInt = 32000
    intermediate_size: PositiveInt = 11008
    max_position_embeddings: PositiveInt = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_interleaved: Literal[False] = False


def _config(given: LlamaConfig, tokens: SpecialTokens) -> TransformerConfig:
    return rotary_decoder_config(
        given, tokens, attention_bias=given.attention_bias, feed_forward_bias=given.mlp_bias
    )


LLAMA = Family(
    title="Llama 2 and 3, TinyLlama, SmolLM",
    model_types=("llama",),
    fields=LlamaConfig,
    to_config=_config,
    weights=rotary_decoder_weights,
    abilities=WRITES,
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
