"""GPT-NeoX and Pythia: attention beside the feed-forward layer, a quarter of each head turns."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from exporter.huggingface.conversion import HeadParts, NameTable, modules
from exporter.huggingface.family import Activation, Family, SpecialTokens
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
    hidden_dropout: Probability = 0.0
    max_position_embeddings: PositiveInt = 2048
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10000.0

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: dict[str, object]) -> dict[str, object]:
        """Give what only this family names otherwise its usual name."""
        return {
            **given,
            "partial_rotary_factor": given.get("rotary_pct", 0.25),
            "rope_theta": given.get("rotary_emb_base", 10000.0),
            "num_key_value_heads": None,
            "head_dim": None,
        }

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is no multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        return self


def _config(source: GPTNeoXConfig, tokens: SpecialTokens) -> TransformerConfig:
    return rotary_decoder_config(
        source,
        tokens,
        attention_bias=source.attention_bias,
        gated_feed_forward=False,
        feed_forward_bias=True,
        norm="layer",
        norm_eps=source.layer_norm_eps,
        parallel_residual=source.use_parallel_residual,
        dropout=source.hidden_dropout,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "decoder.layers.{i}", "gpt_neox.layers.{i}"
    table = modules(
        {
            "decoder.embeddings.token": "gpt_neox.embed_in",
            "decoder.output": ("embed_out", "lm_head"),
            "decoder.final_norm": "gpt_neox.final_layer_norm",
            f"{ours}.self_attention_residual.norm": f"{theirs}.input_layernorm",
            f"{ours}.feed_forward_residual.norm": f"{theirs}.post_attention_layernorm",
            f"{ours}.self_attention.out_proj": f"{theirs}.attention.dense",
            f"{ours}.feed_forward.up_proj": f"{theirs}.mlp.dense_h_to_4h",
            f"{ours}.feed_forward.down_proj": f"{theirs}.mlp.dense_4h_to_h",
        }
    )
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        one = {f"{ours}.self_attention.{name}": f"{theirs}.attention.query_key_value"}
        table |= modules(one, HeadParts(part, 3, config.num_heads))
    return turned_first(config, table)


GPT_NEOX = Family(
    title="GPT-NeoX, Pythia",
    model_types=("gpt_neox",),
    source=GPTNeoXConfig,
    to_config=_config,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    body="gpt_neox.",
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
