"""GPT-2: norm first, learned positions, packed and transposed projections."""

from __future__ import annotations

from exporter.huggingface.conversion import TRANSPOSED, NameTable, layers, modules, packed_inputs
from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.decoder import FIXED, decoder
from exporter.models.config import TransformerConfig


def _computed(original: Original) -> Options:
    config = original.config
    d_ff = 4 * config.n_embd if config.n_inner is None else config.n_inner
    return {**decoder(original), "d_ff": d_ff}


def _weights(config: TransformerConfig) -> NameTable:
    theirs = "transformer.h"
    outputs = {"output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    return {
        **packed_inputs("decoder", f"{theirs}.{{i}}.attn.c_attn", config, TRANSPOSED),
        **layers("decoder", theirs, TRANSPOSED, **outputs),
        **layers("decoder", theirs, attention_norm="ln_1", feed_forward_norm="ln_2"),
        **modules(
            {
                "decoder.embeddings.token": "transformer.wte",
                "decoder.embeddings.positions": "transformer.wpe",
                "decoder.output": "lm_head",
                "decoder.final_norm": "transformer.ln_f",
            }
        ),
    }


GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    fixed=FIXED,
    options={
        "d_model": "n_embd",
        "num_heads": "n_head",
        "num_decoder_layers": "n_layer",
        "d_ff": "n_inner",
        "feed_forward.activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop",
        "attention.dropout": "attn_pdrop",
        "vocab_size": "vocab_size",
        "max_target_len": "n_positions",
        "tie_output": "tie_word_embeddings",
    },
    computed=_computed,
    supported={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    weights=_weights,
    body="transformer.",
    ignored=r".*\.attn\.(bias|masked_bias)",
)
