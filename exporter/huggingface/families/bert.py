"""BERT and RoBERTa: encoders with norm last and learned positions."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.conversion import NameTable, Step, layers, modules, skip_rows
from exporter.huggingface.family import Family, Options, Original
from exporter.huggingface.stacks.encoder import ENCODER, FIXED, encoder, pooler
from exporter.models.config import TransformerConfig


def _bert_weights(body: str, *of_positions: Step) -> NameTable:
    """Return where the weights of the body are; `of_positions` change the table of positions."""
    embeddings = f"{body}embeddings"
    return {
        **layers(
            "encoder",
            f"{body}encoder.layer",
            query="attention.self.query",
            key="attention.self.key",
            value="attention.self.value",
            output="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            up="intermediate.dense",
            down="output.dense",
            feed_forward_norm="output.LayerNorm",
        ),
        **modules(
            {
                "embeddings.token": f"{embeddings}.word_embeddings",
                "embeddings.token_type": f"{embeddings}.token_type_embeddings",
                "embeddings.norm": f"{embeddings}.LayerNorm",
            }
        ),
        **modules({"embeddings.positions": f"{embeddings}.position_embeddings"}, *of_positions),
    }


def _with_head(config: TransformerConfig) -> NameTable:
    head = {"classifier": "classifier", **pooler(config, "bert.pooler.dense")}
    return {**_bert_weights("bert."), **modules(head)}


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
    weights=_with_head,
    body="bert.",
    ignored=r"cls\..*|(bert\.)?(pooler\..*|embeddings\.position_ids)",
)


def _roberta(original: Original) -> Options:
    padding = original.config.pad_token_id or 0
    first = padding + 1  # position
    length = original.config.max_position_embeddings - first
    if length < 1:
        raise ValueError(
            f"max_position_embeddings is {length + first}; supported: at least {first + 1}, for "
            f"positions count from {first} on"
        )
    return {**encoder(original), "max_source_len": length, "uncounted_token_id": padding}


def _roberta_weights(config: TransformerConfig) -> NameTable:
    head = {
        "classifier": "classifier" if config.head.each_token else "classifier.out_proj",
        **pooler(config, "classifier.dense"),
    }
    return {**_bert_weights("roberta.", skip_rows(config.pad_token_id)), **modules(head)}


ROBERTA = replace(
    BERT,
    title="RoBERTa, XLM-R, CamemBERT",
    model_types=("roberta", "xlm-roberta", "camembert"),
    computed=_roberta,
    weights=_roberta_weights,
    body="roberta.",
    ignored=r"lm_head\..*|(roberta\.)?(pooler\..*|embeddings\.position_ids)",
)
