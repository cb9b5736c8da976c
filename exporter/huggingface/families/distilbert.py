"""DistilBERT: BERT without token types; a classifier has a layer with ReLU before it."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, layers, modules
from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.encoder import FIXED, encoder, head_of, pooler
from exporter.models.config import TransformerConfig


def _computed(original: Original) -> Options:
    is_classifier = head_of(original) == "classify"
    return encoder(original, pooler="relu" if is_classifier else "none")


def _weights(config: TransformerConfig) -> NameTable:
    return {
        **layers(
            "encoder",
            "distilbert.transformer.layer",
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            output="attention.out_lin",
            attention_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            feed_forward_norm="output_layer_norm",
        ),
        **modules(
            {
                "embeddings.token": "distilbert.embeddings.word_embeddings",
                "embeddings.positions": "distilbert.embeddings.position_embeddings",
                "embeddings.norm": "distilbert.embeddings.LayerNorm",
                "classifier": "classifier",
                **pooler(config, "pre_classifier"),
            }
        ),
    }


DISTILBERT = Family(
    title="DistilBERT",
    model_types=("distilbert",),
    fixed={**FIXED, "norm_eps": 1e-12},  # whatever is said of the latter
    options={
        "d_model": "dim",
        "num_heads": "n_heads",
        "d_ff": "hidden_dim",
        "num_encoder_layers": "n_layers",
        "feed_forward.activation": "activation",
        "dropout": "dropout",
        "attention.dropout": "attention_dropout",
        "vocab_size": "vocab_size",
        "max_source_len": "max_position_embeddings",
    },
    computed=_computed,
    weights=_weights,
    body="distilbert.",
    ignored=r"vocab_(transform|layer_norm|projector)\..*",
)
