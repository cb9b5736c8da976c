"""Marian: an encoder-decoder with norm last and one embedding for everything."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from exporter.huggingface.conversion import NameTable, Squeezed, StoredWeight, modules
from exporter.huggingface.family import (
    ACTIVATIONS,
    Activation,
    Family,
    SourceConfig,
    SpecialTokens,
)
from exporter.models.config import PositiveInt, Probability, TransformerConfig


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


def _config(source: MarianConfig, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(
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


def _weights(config: TransformerConfig) -> NameTable:
    bias = StoredWeight(("final_logits_bias",), (Squeezed(),), optional=True)
    return {
        **modules(
            {
                "source_embeddings.token": ("model.shared", "model.encoder.embed_tokens"),
                "decoder.embeddings.token": "model.decoder.embed_tokens",
                "decoder.output": "lm_head",
            }
        ),
        "decoder.output.bias": bias,
        **_layer("encoder.layers.{i}", "model.encoder.layers.{i}"),
        **_layer("decoder.layers.{i}", "model.decoder.layers.{i}"),
        **_attention("decoder.layers.{i}.cross_attention", "model.decoder.layers.{i}.encoder_attn"),
    }


def _layer(ours: str, theirs: str) -> NameTable:
    """Return self-attention and feed-forward, which both stacks have."""
    return {
        **_attention(f"{ours}.self_attention", f"{theirs}.self_attn"),
        **modules(
            {
                f"{ours}.feed_forward.up_proj": f"{theirs}.fc1",
                f"{ours}.feed_forward.down_proj": f"{theirs}.fc2",
                f"{ours}.feed_forward_residual.norm": f"{theirs}.final_layer_norm",
            }
        ),
    }


def _attention(ours: str, theirs: str) -> NameTable:
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    projections = {f"{ours}.{name}": f"{theirs}.{name}" for name in names}
    return modules({f"{ours}_residual.norm": f"{theirs}_layer_norm", **projections})


MARIAN = Family(
    title="Marian (OPUS-MT)",
    model_types=("marian",),
    source=MarianConfig,
    to_config=_config,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    ignored=r".*\.embed_positions\.weight",
)
