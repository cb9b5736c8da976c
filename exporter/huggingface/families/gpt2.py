"""GPT-2: norm first, learned positions, packed and transposed projections."""

from __future__ import annotations

from typing import Literal

from exporter.huggingface.conversion import NameTable, Transposed, modules, packed
from exporter.huggingface.family import (
    ACTIVATIONS,
    Activation,
    Family,
    SourceConfig,
    SpecialTokens,
)
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class GPT2Config(SourceConfig):
    """`config.json` of a GPT-2.

    reorder_and_upcast_attn is not here: it changes nothing in float32.
    """

    vocab_size: PositiveInt = 50257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


def _config(source: GPT2Config, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(
        family="gpt",
        d_model=source.n_embd,
        num_heads=source.n_head,
        d_ff=source.n_inner or 4 * source.n_embd,
        num_decoder_layers=source.n_layer,
        activation=ACTIVATIONS[source.activation_function],
        norm_position="first",
        norm_eps=source.layer_norm_epsilon,
        dropout=source.resid_pdrop,
        attention_dropout=source.attn_pdrop,
        vocab_size=source.vocab_size,
        max_target_len=source.n_positions,
        positions="learned",
        scale_embeddings=False,
        tie_output=source.tie_word_embeddings,
        pad_token_id=tokens.pad or 0,
        eos_token_id=tokens.eos,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "decoder.layers.{i}", "transformer.h.{i}"
    parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.d_model)
    return {
        **modules(
            {
                "decoder.embeddings.token": "transformer.wte",
                "decoder.embeddings.positions": "transformer.wpe",
                "decoder.output": "lm_head",
                "decoder.final_norm": "transformer.ln_f",
                f"{ours}.self_attention_residual.norm": f"{theirs}.ln_1",
                f"{ours}.feed_forward_residual.norm": f"{theirs}.ln_2",
            }
        ),
        **packed(f"{ours}.self_attention", parts, f"{theirs}.attn.c_attn", Transposed()),
        **modules(
            {
                f"{ours}.self_attention.out_proj": f"{theirs}.attn.c_proj",
                f"{ours}.feed_forward.up_proj": f"{theirs}.mlp.c_fc",
                f"{ours}.feed_forward.down_proj": f"{theirs}.mlp.c_proj",
            },
            Transposed(),
        ),
    }


GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    source=GPT2Config,
    to_config=_config,
    weights=_weights,
    abilities=("generate", "beam", "score"),
    body="transformer.",
    ignored=r".*\.attn\.(bias|masked_bias)",
)
