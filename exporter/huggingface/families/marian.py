"""Marian: an encoder-decoder with norm last, whose embeddings are shared or each side's own."""

from __future__ import annotations

from exporter.huggingface.bart_like import (
    BODY,
    COMPUTED_POSITIONS,
    BartLikeConfig,
    bart_like,
    bart_like_weights,
)
from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.models.config import PositiveInt, TransformerConfig


class MarianConfig(BartLikeConfig):
    """`config.json` of a Marian model.

    normalize_before, static_position_embeddings and their like are not here: whatever they say,
    norms are last and positions computed.
    """

    decoder_vocab_size: PositiveInt | None = None
    share_encoder_decoder_embeddings: bool = True


def _config(given: MarianConfig, tokens: SpecialTokens) -> TransformerConfig:
    target_size = given.decoder_vocab_size or given.vocab_size
    if tokens.decoder_start is None:
        tokens = SpecialTokens(tokens.eos, tokens.pad, decoder_start=tokens.pad)
    return bart_like(
        given,
        tokens,
        norm_position="last",
        positions="sinusoidal_halves",
        vocab_size=target_size,
        source_vocab_size=None if target_size == given.vocab_size else given.vocab_size,
        share_embeddings=given.share_encoder_decoder_embeddings,
        output_bias=True,
    )


MARIAN = Family(
    title="Marian (OPUS-MT)",
    model_types=("marian",),
    fields=MarianConfig,
    to_config=_config,
    weights=bart_like_weights,
    abilities=WRITES,
    body=BODY,
    ignored=COMPUTED_POSITIONS,
)
