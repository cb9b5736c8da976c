"""Converts Marian: an encoder-decoder with norm last and one embedding for everything."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import model_validator

from exporter.huggingface.conversion import (
    ACTIVATIONS,
    Activation,
    Conversion,
    SourceConfig,
    SourceWeight,
    SpecialTokens,
    linear,
    norm,
)
from exporter.models.config import PositiveInt, Probability, TransformerConfig

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class MarianConfig(SourceConfig):
    """`config.json` of a Marian model; the options of older files are here as well."""

    vocab_size: PositiveInt
    decoder_vocab_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 1024
    d_model: PositiveInt = 1024
    encoder_layers: PositiveInt = 12
    decoder_layers: PositiveInt = 12
    encoder_attention_heads: PositiveInt = 16
    decoder_attention_heads: PositiveInt = 16
    encoder_ffn_dim: PositiveInt = 4096
    decoder_ffn_dim: PositiveInt = 4096
    activation_function: Activation = "gelu"
    scale_embedding: bool = False
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    tie_word_embeddings: Literal[True] = True
    share_encoder_decoder_embeddings: Literal[True] = True
    normalize_before: Literal[False] = False
    normalize_embedding: Literal[False] = False
    add_final_layer_norm: Literal[False] = False
    static_position_embeddings: Literal[True] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        for encoder, decoder in (
            ("encoder_attention_heads", "decoder_attention_heads"),
            ("encoder_ffn_dim", "decoder_ffn_dim"),
            ("vocab_size", "decoder_vocab_size"),
        ):
            given, other = getattr(self, encoder), getattr(self, decoder)
            if other is not None and given != other:
                raise ValueError(f"{encoder} is {given} and {decoder} {other}; supported: equal")
        return self


def convert_marian(raw: dict[str, Any], tokens: SpecialTokens) -> Conversion:
    """Describe a Marian translation model."""
    source = MarianConfig.model_validate(raw)
    config = TransformerConfig(
        family="encoder-decoder",
        d_model=source.d_model,
        num_heads=source.encoder_attention_heads,
        d_ff=source.encoder_ffn_dim,
        num_encoder_layers=source.encoder_layers,
        num_decoder_layers=source.decoder_layers,
        activation=ACTIVATIONS[source.activation_function],
        norm_position="last",
        dropout=source.dropout,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_source_len=source.max_position_embeddings,
        max_target_len=source.max_position_embeddings,
        positions="sinusoidal_halves",
        scale_embeddings=source.scale_embedding,
        output_bias=True,
        pad_token_id=tokens.pad or 0,
        bos_token_id=tokens.pad if tokens.decoder_start is None else tokens.decoder_start,
        eos_token_id=tokens.eos,
    )
    return Conversion(config, _weights(config), re.compile(r".*\.embed_positions\.weight"))


def _weights(config: TransformerConfig) -> dict[str, SourceWeight]:
    weights = {
        "source_embeddings.token.weight": SourceWeight(
            (
                "model.shared.weight",
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
                "lm_head.weight",
            )
        ),
        "decoder.output.bias": SourceWeight(("final_logits_bias",), row=True, optional=True),
    }
    for i in range(config.num_encoder_layers):
        ours, theirs = f"encoder.layers.{i}", f"model.encoder.layers.{i}"
        weights |= _layer(ours, theirs)
    for i in range(config.num_decoder_layers):
        ours, theirs = f"decoder.layers.{i}", f"model.decoder.layers.{i}"
        weights |= _layer(ours, theirs)
        weights |= _attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn")
    return weights


def _layer(ours: str, theirs: str) -> dict[str, SourceWeight]:
    """Return self-attention and feed-forward, which both stacks have."""
    return {
        **_attention(f"{ours}.self_attention", f"{theirs}.self_attn"),
        **linear(f"{ours}.feed_forward.up_proj", f"{theirs}.fc1"),
        **linear(f"{ours}.feed_forward.down_proj", f"{theirs}.fc2"),
        **norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm"),
    }


def _attention(ours: str, theirs: str) -> dict[str, SourceWeight]:
    weights = norm(f"{ours}_residual.norm", f"{theirs}_layer_norm")
    for name in _PROJECTIONS:
        weights |= linear(f"{ours}.{name}", f"{theirs}.{name}")
    return weights
