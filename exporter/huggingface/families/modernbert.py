"""ModernBERT: norm first, rotary positions, most layers with a window, gated feed-forward."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, layers, modules, packed_gates, packed_inputs
from exporter.huggingface.family import ACTIVATIONS, Family, Options, Original
from exporter.huggingface.stacks.encoder import ENCODER, FIXED, encoder, pooler
from exporter.huggingface.stacks.rotary_decoder import local_options
from exporter.models.config import TransformerConfig


def _computed(original: Original) -> Options:
    config = original.config
    rope, windows = local_options(original, config.local_attention // 2 + 1)
    head = encoder(
        original,
        pooling="mean" if config.classifier_pooling == "mean" else "first",
        pooler=ACTIVATIONS[config.classifier_activation],
        pooler_bias=config.classifier_bias,
        pooler_norm=True,
    )
    whole = {
        "positions.rotary_base": rope.rope_theta,
        "positions.rotary_scaling": rope.scaling(config),
    }
    return {**head, **windows, **whole}


def _weights(config: TransformerConfig) -> NameTable:
    theirs = {"output": "attn.Wo", "attention_norm": "attn_norm"}
    theirs |= {"down": "mlp.Wo", "feed_forward_norm": "mlp_norm"}
    around = {
        "embeddings.token": "model.embeddings.tok_embeddings",
        "embeddings.norm": "model.embeddings.norm",
        "encoder.final_norm": "model.final_norm",
        "pooler.norm": "head.norm",
        "classifier": "classifier",
        **pooler(config, "head.dense"),
    }
    return {
        **packed_inputs("encoder", "model.layers.{i}.attn.Wqkv", config),
        **packed_gates("encoder", "model.layers.{i}.mlp.Wi", config),
        **layers("encoder", "model.layers", **theirs),
        **modules(around),
    }


MODERNBERT = Family(
    title="ModernBERT",
    model_types=("modernbert",),
    fixed={
        **FIXED,
        "feed_forward.gated": True,
        "norm_position": "first",
        "first_norm": False,
        "positions.kind": "rotary",
    },
    options={
        **ENCODER,
        "feed_forward.activation": "hidden_activation",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "dropout": "embedding_dropout",
        "attention.dropout": "attention_dropout",
        "attention.bias": "attention_bias",
        "feed_forward.bias": "mlp_bias",
    },
    computed=_computed,
    supported={"classifier_activation": tuple(ACTIVATIONS)},
    weights=_weights,
    body="model.",
    ignored=r"head\..*|decoder\..*",
)
