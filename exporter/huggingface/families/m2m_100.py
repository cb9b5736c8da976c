"""M2M-100 and NLLB: norm first, positions as in tensor2tensor, languages told by tokens."""

from __future__ import annotations

from pydantic import NonNegativeInt

from exporter.huggingface.bart_like import (
    BODY,
    COMPUTED_POSITIONS,
    BartLikeConfig,
    bart_like,
    bart_like_weights,
)
from exporter.huggingface.family import WRITES, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class M2M100Config(BartLikeConfig):
    """`config.json` of an M2M-100 or NLLB."""

    vocab_size: PositiveInt = 128112
    activation_function: Activation = "relu"
    scale_embedding: bool = True
    attention_dropout: Probability = 0.1
    pad_token_id: NonNegativeInt = 1


def _config(given: M2M100Config, tokens: SpecialTokens) -> TransformerConfig:
    return bart_like(
        given,
        tokens,
        norm_position="first",
        positions="sinusoidal_tensor2tensor",
        position_offset=given.pad_token_id + 1,  # fairseq counts from there, and no padding
        uncounted_token_id=given.pad_token_id,
    )


M2M_100 = Family(
    title="M2M-100, NLLB",
    model_types=("m2m_100",),
    fields=M2M100Config,
    to_config=_config,
    weights=bart_like_weights,
    abilities=WRITES,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
