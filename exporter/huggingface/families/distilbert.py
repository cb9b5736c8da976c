"""DistilBERT: BERT without token types; a classifier has a layer with ReLU before it."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, modules
from exporter.huggingface.encoder_heads import HeadedConfig, pooler
from exporter.huggingface.family import ACTIVATIONS, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class DistilBertConfig(HeadedConfig):
    """`config.json` of a DistilBERT.

    sinusoidal_pos_embds is not here: such positions are stored like trained ones.
    """

    vocab_size: PositiveInt = 30522
    max_position_embeddings: PositiveInt = 512
    n_layers: PositiveInt = 6
    n_heads: PositiveInt = 12
    dim: PositiveInt = 768
    hidden_dim: PositiveInt = 3072
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation: Activation = "gelu"
    pad_token_id: int | None = 0


def _config(source: DistilBertConfig, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(
        **source.head_options(pooler="relu" if source.head == "classify" else "none"),
        d_model=source.dim,
        num_heads=source.n_heads,
        d_ff=source.hidden_dim,
        num_encoder_layers=source.n_layers,
        activation=ACTIVATIONS[source.activation],
        norm_position="last",
        norm_eps=1e-12,
        dropout=source.dropout,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_source_len=source.max_position_embeddings,
        positions="learned",
        scale_embeddings=False,
        embedding_norm=True,
        pad_token_id=source.pad_token_id or 0,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "encoder.layers.{i}", "distilbert.transformer.layer.{i}"
    return modules(
        {
            "embeddings.token": "distilbert.embeddings.word_embeddings",
            "embeddings.positions": "distilbert.embeddings.position_embeddings",
            "embeddings.norm": "distilbert.embeddings.LayerNorm",
            f"{ours}.self_attention.q_proj": f"{theirs}.attention.q_lin",
            f"{ours}.self_attention.k_proj": f"{theirs}.attention.k_lin",
            f"{ours}.self_attention.v_proj": f"{theirs}.attention.v_lin",
            f"{ours}.self_attention.out_proj": f"{theirs}.attention.out_lin",
            f"{ours}.self_attention_residual.norm": f"{theirs}.sa_layer_norm",
            f"{ours}.feed_forward.up_proj": f"{theirs}.ffn.lin1",
            f"{ours}.feed_forward.down_proj": f"{theirs}.ffn.lin2",
            f"{ours}.feed_forward_residual.norm": f"{theirs}.output_layer_norm",
            "classifier": "classifier",
            **pooler(config, "pre_classifier"),
        }
    )


DISTILBERT = Family(
    title="DistilBERT",
    model_types=("distilbert",),
    source=DistilBertConfig,
    to_config=_config,
    weights=_weights,
    abilities=("classify", "label", "embed"),
    body="distilbert.",
    ignored=r"vocab_(transform|layer_norm|projector)\..*",
)
