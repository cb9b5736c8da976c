"""The options that encoders of texts share: BERT's, unless a family has others."""

from __future__ import annotations

from typing import Any

from exporter.huggingface.family import Options, Original
from exporter.huggingface.stacks.encoder_heads import head_options

LAYERS = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "num_encoder_layers": "num_hidden_layers",
    "feed_forward.activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention.dropout": "attention_probs_dropout_prob",
}
ENCODER = {
    **LAYERS,
    "vocab_size": "vocab_size",
    "max_source_len": "max_position_embeddings",
}


FIXED = {
    "architecture": "encoder",
    "norm_position": "last",
    "positions.kind": "learned",
    "scale_embeddings": False,
    "embedding_norm": True,
}


def encoder(original: Original, **of_labels: Any) -> Options:
    """Return the head and the padding; `of_labels` are options of a head that has labels."""
    padding = original.config.pad_token_id or 0
    return {**head_options(original, **of_labels), "pad_token_id": padding}
