"""BERT: an encoder with norm last, learned positions and token types."""

from __future__ import annotations

from typing import Literal

from exporter.huggingface.conversion import NameTable, Step, layers, modules, norms
from exporter.huggingface.encoder import EncoderConfig, encoder_config
from exporter.huggingface.encoder_heads import pooler
from exporter.huggingface.family import READS, Family, SpecialTokens
from exporter.models.config import PositiveInt, TransformerConfig


class BertConfig(EncoderConfig):
    """`config.json` of a BERT, and of what was built like it."""

    type_vocab_size: PositiveInt = 2
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


def bert_weights(body: str, *of_positions: Step) -> NameTable:
    """Return where the weights of the body are; `of_positions` change the table of positions."""
    ours, theirs = "encoder.layers.{i}", f"{body}encoder.layer.{{i}}"
    embeddings = f"{body}embeddings"
    return {
        **layers(
            "encoder",
            f"{body}encoder.layer",
            query="attention.self.query",
            key="attention.self.key",
            value="attention.self.value",
            output="attention.output.dense",
            up="intermediate.dense",
            down="output.dense",
        ),
        **modules(
            {
                "embeddings.token": f"{embeddings}.word_embeddings",
                "embeddings.token_type": f"{embeddings}.token_type_embeddings",
            }
        ),
        **modules({"embeddings.positions": f"{embeddings}.position_embeddings"}, *of_positions),
        **norms(
            {
                f"{ours}.self_attention_residual.norm": f"{theirs}.attention.output.LayerNorm",
                f"{ours}.feed_forward_residual.norm": f"{theirs}.output.LayerNorm",
                "embeddings.norm": f"{embeddings}.LayerNorm",
            }
        ),
    }


def _config(given: BertConfig, tokens: SpecialTokens) -> TransformerConfig:
    return encoder_config(given, num_token_types=given.type_vocab_size)


def _weights(config: TransformerConfig) -> NameTable:
    head = {"classifier": "classifier", **pooler(config, "bert.pooler.dense")}
    return {**bert_weights("bert."), **modules(head)}


BERT = Family(
    title="BERT",
    model_types=("bert",),
    fields=BertConfig,
    to_config=_config,
    weights=_weights,
    abilities=READS,
    body="bert.",
    ignored=r"cls\..*|(bert\.)?(pooler\..*|embeddings\.position_ids)",
)
