"""BERT: an encoder with norm last, learned positions and token types."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, Step, layers, modules, norms
from exporter.huggingface.family import READS, Family
from exporter.huggingface.stacks.encoder import ENCODER, FIXED, encoder
from exporter.huggingface.stacks.encoder_heads import label_notes, pooler
from exporter.models.config import TransformerConfig


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


def _weights(config: TransformerConfig) -> NameTable:
    head = {"classifier": "classifier", **pooler(config, "bert.pooler.dense")}
    return {**bert_weights("bert."), **modules(head)}


BERT = Family(
    title="BERT",
    model_types=("bert",),
    fixed=FIXED,
    options={**ENCODER, "num_token_types": "type_vocab_size"},
    computed=encoder,
    supported={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    notes=label_notes,
    weights=_weights,
    abilities=READS,
    body="bert.",
    ignored=r"cls\..*|(bert\.)?(pooler\..*|embeddings\.position_ids)",
)
