"""ModernBERT: norm first, rotary positions, most layers with a window, gated feed-forward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from exporter.huggingface.conversion import NameTable, layers, modules, packed_gates, packed_inputs
from exporter.huggingface.encoder import EncoderConfig, encoder_config
from exporter.huggingface.encoder_heads import pooler
from exporter.huggingface.family import ACTIVATIONS, READS, Activation, Family, SpecialTokens
from exporter.huggingface.layered import LayeredRopeConfig
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class ModernBertConfig(LayeredRopeConfig, EncoderConfig):
    """`config.json` of a ModernBERT."""

    vocab_size: PositiveInt = 50368
    intermediate_size: PositiveInt = 1152
    num_hidden_layers: PositiveInt = 22
    hidden_act: Activation = Field("gelu", alias="hidden_activation")
    max_position_embeddings: PositiveInt = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pad_token_id: int = 50283
    attention_bias: bool = False
    attention_probs_dropout_prob: Probability = Field(0.0, alias="attention_dropout")
    hidden_dropout_prob: Probability = Field(0.0, alias="embedding_dropout")
    mlp_bias: bool = False
    sliding_window_pattern: PositiveInt = Field(3, alias="global_attn_every_n_layers")
    local_attention: PositiveInt = 128
    sliding_window: PositiveInt | None = None  # half of local_attention, and counts before it
    rope_scaling: None = None
    rope_theta: float = Field(160_000.0, alias="global_rope_theta")
    rope_local_base_freq: float = Field(10_000.0, alias="local_rope_theta")
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: Activation = "gelu"


def _config(given: ModernBertConfig, tokens: SpecialTokens) -> TransformerConfig:
    differences = {
        **given.head_options(
            pooling="mean" if given.classifier_pooling == "mean" else "first",
            pooler=ACTIVATIONS[given.classifier_activation],
            pooler_bias=given.classifier_bias,
            pooler_norm=True,
        ),
        **given.local_options((given.sliding_window or given.local_attention // 2) + 1),
        "attention_bias": given.attention_bias,
        "gated_feed_forward": True,
        "feed_forward_bias": given.mlp_bias,
        "norm_position": "first",
        "norm_bias": given.norm_bias,
        "first_norm": False,
        "positions": "rotary",
        "rotary_base": given.rope.rope_theta or given.rope_theta,
        "rotary_scaling": given.rope.scaling(given.max_position_embeddings),
    }
    return encoder_config(given, **differences)


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
    fields=ModernBertConfig,
    to_config=_config,
    weights=_weights,
    abilities=READS,
    body="model.",
    ignored=r"head\..*|decoder\..*",
)
