"""RoBERTa, XLM-R and CamemBERT: BERT whose positions count tokens from the padding's id on."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.conversion import NameTable, SkipRows, modules
from exporter.huggingface.families.bert import BERT, bert_weights
from exporter.huggingface.family import Options, Original
from exporter.huggingface.stacks.encoder import encoder
from exporter.huggingface.stacks.encoder_heads import pooler
from exporter.models.config import TransformerConfig


def _computed(original: Original) -> Options:
    padding = original.config.pad_token_id or 0
    first = padding + 1  # position
    length = original.config.max_position_embeddings - first
    if length < 1:
        raise ValueError(
            f"max_position_embeddings is {length + first}; supported: at least {first + 1}, for "
            f"positions count from {first} on"
        )
    return {**encoder(original), "max_source_len": length, "uncounted_token_id": padding}


def _weights(config: TransformerConfig) -> NameTable:
    head = {
        "classifier": "classifier" if config.head.each_token else "classifier.out_proj",
        **pooler(config, "classifier.dense"),
    }
    return {**bert_weights("roberta.", SkipRows(config.pad_token_id)), **modules(head)}


ROBERTA = replace(
    BERT,
    title="RoBERTa, XLM-R, CamemBERT",
    model_types=("roberta", "xlm-roberta", "camembert"),
    computed=_computed,
    weights=_weights,
    body="roberta.",
    ignored=r"lm_head\..*|(roberta\.)?(pooler\..*|embeddings\.position_ids)",
)
