"""Converts GPT-2: norm first, learned positions, packed and transposed projections."""

from __future__ import annotations

import re
from typing import Any, Literal

from exporter.huggingface.conversion import (
    ACTIVATIONS,
    Activation,
    Conversion,
    SourceConfig,
    SourceWeight,
    SpecialTokens,
    linear,
    norm,
    token_and_output,
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


def convert_gpt2(raw: dict[str, Any], tokens: SpecialTokens) -> Conversion:
    """Describe a GPT-2 language model."""
    source = GPT2Config.model_validate(raw)
    config = TransformerConfig(
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
    return Conversion(config, _weights(config), re.compile(r".*\.attn\.(bias|masked_bias)"))


def _weights(config: TransformerConfig) -> dict[str, SourceWeight]:
    weights = {
        **token_and_output(_names("wte.weight"), tied=config.tie_output),
        "decoder.embeddings.positions.weight": SourceWeight(_names("wpe.weight")),
        **norm("decoder.final_norm", *_names("ln_f")),
    }
    for i in range(config.num_decoder_layers):
        weights |= _layer(f"decoder.layers.{i}", f"h.{i}")
    return weights


def _layer(ours: str, theirs: str) -> dict[str, SourceWeight]:
    weights = {
        **norm(f"{ours}.self_attention_residual.norm", *_names(f"{theirs}.ln_1")),
        **norm(f"{ours}.feed_forward_residual.norm", *_names(f"{theirs}.ln_2")),
    }
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        for kind in ("weight", "bias"):
            weights[f"{ours}.self_attention.{name}.{kind}"] = SourceWeight(
                _names(f"{theirs}.attn.c_attn.{kind}"),
                transposed=kind == "weight",
                part=part,
                num_parts=3,
            )
    for target, source in (
        ("self_attention.out_proj", "attn.c_proj"),
        ("feed_forward.up_proj", "mlp.c_fc"),
        ("feed_forward.down_proj", "mlp.c_proj"),
    ):
        weights |= linear(f"{ours}.{target}", *_names(f"{theirs}.{source}"), transposed=True)
    return weights


def _names(name: str) -> tuple[str, str]:
    """Return the two names of a weight: saved with the language model, or from the body alone."""
    return f"transformer.{name}", name
