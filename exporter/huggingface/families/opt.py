"""OPT: learned positions that count from 2, norm first but in one published size."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from exporter.huggingface.conversion import NameTable, SkipRows, modules
from exporter.huggingface.family import (
    ACTIVATIONS,
    Activation,
    Family,
    SourceConfig,
    SpecialTokens,
)
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class OPTConfig(SourceConfig):
    """`config.json` of an OPT."""

    vocab_size: PositiveInt = 50272
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    ffn_dim: PositiveInt = 3072
    num_attention_heads: PositiveInt = 12
    max_position_embeddings: PositiveInt = 2048
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = Field(default=False, alias="_remove_final_layer_norm")
    word_embed_proj_dim: PositiveInt | None = None
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_function: Activation = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: Literal[True] = True
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        width = self.word_embed_proj_dim
        if width is not None and width != self.hidden_size:
            raise ValueError(
                f"word_embed_proj_dim is {width} and hidden_size {self.hidden_size}; "
                "supported: equal"
            )
        return self


def _config(source: OPTConfig, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(
        family="gpt",
        d_model=source.hidden_size,
        num_heads=source.num_attention_heads,
        attention_bias=source.enable_bias,
        d_ff=source.ffn_dim,
        num_decoder_layers=source.num_hidden_layers,
        activation=ACTIVATIONS[source.activation_function],
        feed_forward_bias=source.enable_bias,
        norm_position="first" if source.do_layer_norm_before else "last",
        final_norm=source.do_layer_norm_before and not source.remove_final_layer_norm,
        dropout=source.dropout,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_target_len=source.max_position_embeddings,
        positions="learned",
        scale_embeddings=False,
        tie_output=source.tie_word_embeddings,
        pad_token_id=tokens.pad or 0,
        eos_token_id=tokens.eos,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "decoder.layers.{i}", "model.decoder.layers.{i}"
    positions = {"decoder.embeddings.positions": "model.decoder.embed_positions"}
    return {
        **modules(
            {
                "decoder.embeddings.token": "model.decoder.embed_tokens",
                "decoder.output": "lm_head",
                "decoder.final_norm": "model.decoder.final_layer_norm",
                f"{ours}.self_attention_residual.norm": f"{theirs}.self_attn_layer_norm",
                f"{ours}.self_attention.q_proj": f"{theirs}.self_attn.q_proj",
                f"{ours}.self_attention.k_proj": f"{theirs}.self_attn.k_proj",
                f"{ours}.self_attention.v_proj": f"{theirs}.self_attn.v_proj",
                f"{ours}.self_attention.out_proj": f"{theirs}.self_attn.out_proj",
                f"{ours}.feed_forward_residual.norm": f"{theirs}.final_layer_norm",
                f"{ours}.feed_forward.up_proj": f"{theirs}.fc1",
                f"{ours}.feed_forward.down_proj": f"{theirs}.fc2",
            }
        ),
        **modules(positions, SkipRows(2)),
    }


OPT = Family(
    title="OPT",
    model_types=("opt",),
    source=OPTConfig,
    to_config=_config,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    body="model.",
)
