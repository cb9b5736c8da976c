"""What encoders of texts share: all is as in BERT, but for what a family says."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from exporter.huggingface.encoder_heads import HeadedConfig
from exporter.huggingface.family import Activation
from exporter.huggingface.stack import StackConfig
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class EncoderConfig(StackConfig, HeadedConfig):
    """`config.json` of an encoder."""

    vocab_size: PositiveInt = 30522
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: PositiveInt = 512
    norm_eps: float = Field(1e-12, alias="layer_norm_eps")
    pad_token_id: int | None = 0


def encoder_config(given: EncoderConfig, **differences: Any) -> TransformerConfig:
    """Return the options of a BERT without token types, those in `differences` instead of its."""
    usual = {
        **given.layer_options,
        **given.head_options(),
        "num_encoder_layers": given.num_hidden_layers,
        "norm_position": "last",
        "vocab_size": given.vocab_size,
        "max_source_len": given.max_position_embeddings,
        "positions": "learned",
        "scale_embeddings": False,
        "embedding_norm": True,
        "pad_token_id": given.pad_token_id or 0,
    }
    return TransformerConfig.model_validate({**usual, **differences})
