"""BERT: an encoder with norm last, learned positions and token types."""

from __future__ import annotations

from typing import Any, Literal

from exporter.huggingface.conversion import NameTable, Step, StoredWeight, modules
from exporter.huggingface.encoder_heads import HeadedConfig, pooler
from exporter.huggingface.family import ACTIVATIONS, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class BertConfig(HeadedConfig):
    """`config.json` of a BERT, and of what was built like it."""

    vocab_size: PositiveInt = 30522
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: PositiveInt = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


def bert_options(source: BertConfig) -> dict[str, Any]:
    """Return the options that BERT and RoBERTa share."""
    return {
        "d_model": source.hidden_size,
        "num_heads": source.num_attention_heads,
        "d_ff": source.intermediate_size,
        "num_encoder_layers": source.num_hidden_layers,
        "activation": ACTIVATIONS[source.hidden_act],
        "norm_position": "last",
        "norm_eps": source.layer_norm_eps,
        "dropout": source.hidden_dropout_prob,
        "attention_dropout": source.attention_probs_dropout_prob,
        "vocab_size": source.vocab_size,
        "max_source_len": source.max_position_embeddings,
        "positions": "learned",
        "scale_embeddings": False,
        "embedding_norm": True,
        "num_token_types": source.type_vocab_size,
        "pad_token_id": source.pad_token_id or 0,
    }


def bert_weights(body: str, *of_positions: Step) -> NameTable:
    """Return where the weights of the body are; `of_positions` change the table of positions."""
    ours, theirs = "encoder.layers.{i}", f"{body}encoder.layer.{{i}}"
    embeddings = f"{body}embeddings"
    linear = {
        f"{ours}.self_attention.q_proj": f"{theirs}.attention.self.query",
        f"{ours}.self_attention.k_proj": f"{theirs}.attention.self.key",
        f"{ours}.self_attention.v_proj": f"{theirs}.attention.self.value",
        f"{ours}.self_attention.out_proj": f"{theirs}.attention.output.dense",
        f"{ours}.feed_forward.up_proj": f"{theirs}.intermediate.dense",
        f"{ours}.feed_forward.down_proj": f"{theirs}.output.dense",
        "embeddings.token": f"{embeddings}.word_embeddings",
        "embeddings.token_type": f"{embeddings}.token_type_embeddings",
    }
    norms = {
        f"{ours}.self_attention_residual.norm": f"{theirs}.attention.output.LayerNorm",
        f"{ours}.feed_forward_residual.norm": f"{theirs}.output.LayerNorm",
        "embeddings.norm": f"{embeddings}.LayerNorm",
    }
    return {
        **modules(linear),
        **modules({"embeddings.positions": f"{embeddings}.position_embeddings"}, *of_positions),
        **{name: weight for pair in norms.items() for name, weight in _norm(*pair).items()},
    }


def _norm(ours: str, theirs: str) -> NameTable:
    """Return weight and bias; those that came from TensorFlow have names of their own."""
    names = {"weight": "gamma", "bias": "beta"}
    return {
        f"{ours}.{name}": StoredWeight((f"{theirs}.{name}", f"{theirs}.{old}"))
        for name, old in names.items()
    }


def _config(source: BertConfig, tokens: SpecialTokens) -> TransformerConfig:
    return TransformerConfig(**bert_options(source), **source.head_options())


def _weights(config: TransformerConfig) -> NameTable:
    head = {"classifier": "classifier", **pooler(config, "bert.pooler.dense")}
    return {**bert_weights("bert."), **modules(head)}


BERT = Family(
    title="BERT",
    model_types=("bert",),
    source=BertConfig,
    to_config=_config,
    weights=_weights,
    abilities=("classify", "label", "embed"),
    body="bert.",
    ignored=r"cls\..*|(bert\.)?(pooler\..*|embeddings\.position_ids)",
)
