"""OPT: learned positions that count from 2; in one published size norm last, tokens narrower."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, modules, skip_rows
from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.bart_like import BODY, UNUSED, layer_weights
from exporter.huggingface.stacks.decoder import DECODER, FIXED, decoder
from exporter.models.config import TransformerConfig


def _computed(original: Original) -> Options:
    config = original.config
    width, is_first = config.word_embed_proj_dim, config.do_layer_norm_before
    return {
        **decoder(original),
        "norm_position": "first" if is_first else "last",
        "final_norm": is_first and not config._remove_final_layer_norm,
        "token_dim": None if width == config.hidden_size else width,
    }


def _weights(config: TransformerConfig) -> NameTable:
    positions = {"decoder.embeddings.positions": "model.decoder.embed_positions"}
    return {
        **layer_weights("decoder"),
        **modules(positions, skip_rows(2)),
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
    fixed={**FIXED, "norm_eps": 1e-5},  # whatever is said of the latter
    options={
        **DECODER,
        "dropout": "dropout",
        "d_ff": "ffn_dim",
        "feed_forward.activation": "activation_function",
        "attention.dropout": "attention_dropout",
        "attention.bias": "enable_bias",
        "feed_forward.bias": "enable_bias",
    },
    computed=_computed,
    supported={"layer_norm_elementwise_affine": (True,)},
    weights=_weights,
    body=BODY,
    ignored=UNUSED,
)
