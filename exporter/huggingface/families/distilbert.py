"""DistilBERT: BERT without token types; a classifier has a layer with ReLU before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from exporter.huggingface.conversion import NameTable, layers, modules
from exporter.huggingface.encoder import EncoderConfig, encoder_config
from exporter.huggingface.encoder_heads import pooler
from exporter.huggingface.family import READS, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class DistilBertConfig(EncoderConfig):
    """`config.json` of a DistilBERT.

    sinusoidal_pos_embds is not here: such positions are stored like trained ones.
    """

    second_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }

    num_hidden_layers: PositiveInt = Field(6, alias="n_layers")
    num_attention_heads: PositiveInt = Field(12, alias="n_heads")
    hidden_size: PositiveInt = Field(768, alias="dim")
    intermediate_size: PositiveInt = Field(3072, alias="hidden_dim")
    hidden_dropout_prob: Probability = Field(0.1, alias="dropout")
    attention_probs_dropout_prob: Probability = Field(0.1, alias="attention_dropout")
    hidden_act: Activation = Field("gelu", alias="activation")


def _config(given: DistilBertConfig, tokens: SpecialTokens) -> TransformerConfig:
    pooled = given.head_options(pooler="relu" if given.head == "classify" else "none")
    return encoder_config(given, norm_eps=1e-12, **pooled)  # whatever is said


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
    fields=DistilBertConfig,
    to_config=_config,
    weights=_weights,
    abilities=READS,
    body="distilbert.",
    ignored=r"vocab_(transform|layer_norm|projector)\..*",
)
