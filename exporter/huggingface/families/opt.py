"""OPT: learned positions that count from 2; in one published size norm last, tokens narrower."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from exporter.huggingface.bart_like import BODY, UNUSED, layer_weights
from exporter.huggingface.conversion import NameTable, SkipRows, modules
from exporter.huggingface.decoder import DecoderConfig, decoder_config
from exporter.huggingface.family import WRITES, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class OPTConfig(DecoderConfig):
    """`config.json` of an OPT."""

    vocab_size: PositiveInt = 50272
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    intermediate_size: PositiveInt = Field(3072, alias="ffn_dim")
    num_attention_heads: PositiveInt = 12
    max_position_embeddings: PositiveInt = 2048
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = Field(default=False, alias="_remove_final_layer_norm")
    word_embed_proj_dim: PositiveInt | None = None
    hidden_dropout_prob: Probability = Field(0.1, alias="dropout")
    attention_probs_dropout_prob: Probability = Field(0.0, alias="attention_dropout")
    hidden_act: Activation = Field("relu", alias="activation_function")
    enable_bias: bool = True
    layer_norm_elementwise_affine: Literal[True] = True


def _config(given: OPTConfig, tokens: SpecialTokens) -> TransformerConfig:
    width = given.word_embed_proj_dim
    return decoder_config(
        given,
        tokens,
        norm_eps=1e-5,  # whatever is said
        attention_bias=given.enable_bias,
        feed_forward_bias=given.enable_bias,
        norm_position="first" if given.do_layer_norm_before else "last",
        final_norm=given.do_layer_norm_before and not given.remove_final_layer_norm,
        token_dim=None if width == given.hidden_size else width,
    )


def _weights(config: TransformerConfig) -> NameTable:
    positions = {"decoder.embeddings.positions": "model.decoder.embed_positions"}
    return {
        **layer_weights("decoder"),
        **modules(positions, SkipRows(2)),
        **modules(
            {
                "decoder.embeddings.token": "model.decoder.embed_tokens",
                "decoder.embeddings.token_in": "model.decoder.project_in",
                "decoder.token_out": "model.decoder.project_out",
                "decoder.output": "lm_head",
                "decoder.final_norm": "model.decoder.final_layer_norm",
            }
        ),
    }


OPT = Family(
    title="OPT",
    model_types=("opt",),
    fields=OPTConfig,
    to_config=_config,
    weights=_weights,
    abilities=WRITES,
    body=BODY,
    ignored=UNUSED,
)
