"""Llama: rotary positions, mean-square norms first, gated feed-forward layers."""

from __future__ import annotations

from typing import Literal

from exporter.huggingface.conversion import NameTable, modules
from exporter.huggingface.family import (
    ACTIVATIONS,
    Activation,
    Family,
    SourceConfig,
    SpecialTokens,
)
from exporter.huggingface.rope import RopeParameters
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class LlamaConfig(SourceConfig):
    """`config.json` of a Llama; older files have `rope_theta` and `rope_scaling` apart.

    pretraining_tp is not here: it changes only the order of a sum.
    """

    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    rope_interleaved: Literal[False] = False

    @property
    def rope(self) -> RopeParameters:
        """Return how positions turn, wherever it is written."""
        return self.rope_parameters or self.rope_scaling or RopeParameters()


def _config(source: LlamaConfig, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(
        family="gpt",
        d_model=source.hidden_size,
        num_heads=source.num_attention_heads,
        num_kv_heads=source.num_key_value_heads,
        key_dim=source.head_dim,
        value_dim=source.head_dim,
        attention_bias=source.attention_bias,
        d_ff=source.intermediate_size,
        num_decoder_layers=source.num_hidden_layers,
        activation=ACTIVATIONS[source.hidden_act],
        gated_feed_forward=True,
        feed_forward_bias=source.mlp_bias,
        norm="rms",
        norm_position="first",
        norm_eps=source.rms_norm_eps,
        dropout=0.0,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_target_len=source.max_position_embeddings,
        positions="rotary",
        rotary_base=source.rope.rope_theta or source.rope_theta,
        rotary_scaling=source.rope.scaling(),
        scale_embeddings=False,
        tie_output=source.tie_word_embeddings,
        pad_token_id=tokens.pad or 0,
        eos_token_id=tokens.eos,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "decoder.layers.{i}", "model.layers.{i}"
    return modules(
        {
            "decoder.embeddings.token": "model.embed_tokens",
            "decoder.output": "lm_head",
            "decoder.final_norm": "model.norm",
            f"{ours}.self_attention_residual.norm": f"{theirs}.input_layernorm",
            f"{ours}.self_attention.q_proj": f"{theirs}.self_attn.q_proj",
            f"{ours}.self_attention.k_proj": f"{theirs}.self_attn.k_proj",
            f"{ours}.self_attention.v_proj": f"{theirs}.self_attn.v_proj",
            f"{ours}.self_attention.out_proj": f"{theirs}.self_attn.o_proj",
            f"{ours}.feed_forward_residual.norm": f"{theirs}.post_attention_layernorm",
            f"{ours}.feed_forward.gate_proj": f"{theirs}.mlp.gate_proj",
            f"{ours}.feed_forward.up_proj": f"{theirs}.mlp.up_proj",
            f"{ours}.feed_forward.down_proj": f"{theirs}.mlp.down_proj",
        }
    )


LLAMA = Family(
    title="Llama 2 and 3, TinyLlama, SmolLM",
    model_types=("llama",),
    source=LlamaConfig,
    to_config=_config,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
