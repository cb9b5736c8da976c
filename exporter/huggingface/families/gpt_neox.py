"""GPT-NeoX and Pythia: attention beside the feed-forward layer, a quarter of each head turns."""

from __future__ import annotations

from functools import partial

from exporter.huggingface.conversion import NameTable, head_parts, layers, modules
from exporter.huggingface.family import Family
from exporter.huggingface.stacks.rotary_decoder import (
    ROTARY,
    ROTARY_FIXED,
    length_notes,
    rotary,
    turned_first,
)
from exporter.models.config import TransformerConfig


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
        table |= layers("decoder", "gpt_neox.layers", head_parts(i, 3, config.num_heads), **packed)
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
    fixed={
        **ROTARY_FIXED,
        "feed_forward.gated": False,
        "feed_forward.bias": True,
        "norm": "layer",
    },
    options={
        **ROTARY,
        "attention.bias": "attention_bias",
        "dropout": "hidden_dropout",
        "norm_eps": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
    },
    computed=partial(rotary, turns_parts=True),
    notes=length_notes,
    weights=_weights,
    body="gpt_neox.",
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
