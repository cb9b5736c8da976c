"""GPT-NeoX and Pythia: attention beside the feed-forward layer, a quarter of each head turns."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from exporter.huggingface.conversion import HeadParts, NameTable, layers, modules
from exporter.huggingface.family import WRITES, Activation, Family, SpecialTokens
from exporter.huggingface.rotary_decoder import (
    RotaryDecoderConfig,
    rotary_decoder_config,
    turned_first,
)
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class GPTNeoXConfig(RotaryDecoderConfig):
    """`config.json` of a GPT-NeoX."""

    turns_parts: ClassVar[bool] = True

    vocab_size: PositiveInt = 50432
    hidden_size: PositiveInt = 6144
    intermediate_size: PositiveInt = 24576
    num_hidden_layers: PositiveInt = 44
    num_attention_heads: PositiveInt = 64
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = Field(0.0, alias="hidden_dropout")
    max_position_embeddings: PositiveInt = 2048
    norm_eps: float = Field(1e-5, alias="layer_norm_eps")
    use_parallel_residual: bool = True
    attention_bias: bool = True
    partial_rotary_factor: float = Field(0.25, alias="rotary_pct")
    rope_theta: float = Field(10000.0, alias="rotary_emb_base")


def _config(given: GPTNeoXConfig, tokens: SpecialTokens) -> TransformerConfig:
    return rotary_decoder_config(
        given,
        tokens,
        attention_bias=given.attention_bias,
        gated_feed_forward=False,
        feed_forward_bias=True,
        norm="layer",
        parallel_residual=given.use_parallel_residual,
    )


def _weights(config: TransformerConfig) -> NameTable:
    table = layers(
        "decoder",
        "gpt_neox.layers",
        output="attention.dense",
        attention_norm="input_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        feed_forward_norm="post_attention_layernorm",
    )
    for i, part in enumerate(("query", "key", "value")):
        packed = {part: "attention.query_key_value"}
        table |= layers("decoder", "gpt_neox.layers", HeadParts(i, 3, config.num_heads), **packed)
    table |= modules(
        {
            "decoder.embeddings.token": "gpt_neox.embed_in",
            "decoder.output": ("embed_out", "lm_head"),
            "decoder.final_norm": "gpt_neox.final_layer_norm",
        }
    )
    return turned_first(config, table)


GPT_NEOX = Family(
    title="GPT-NeoX, Pythia",
    model_types=("gpt_neox",),
    fields=GPTNeoXConfig,
    to_config=_config,
    weights=_weights,
    abilities=WRITES,
    body="gpt_neox.",
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
