"""RoBERTa, XLM-R and CamemBERT: BERT whose positions count tokens from the padding's id on."""

from __future__ import annotations

from exporter.huggingface.conversion import NameTable, SkipRows, modules
from exporter.huggingface.encoder import encoder_config
from exporter.huggingface.encoder_heads import pooler
from exporter.huggingface.families.bert import BertConfig, bert_weights
from exporter.huggingface.family import READS, Family, SpecialTokens
from exporter.models.config import PositiveInt, TransformerConfig


class RobertaConfig(BertConfig):
    """`config.json` of a RoBERTa."""

    vocab_size: PositiveInt = 50265
    pad_token_id: int = 1


def _config(given: RobertaConfig, tokens: SpecialTokens) -> TransformerConfig:
    length = given.max_position_embeddings - given.pad_token_id - 1
    return encoder_config(
        given,
        num_token_types=given.type_vocab_size,
        max_source_len=length,
        uncounted_token_id=given.pad_token_id,
    )


def _weights(config: TransformerConfig) -> NameTable:
    is_labeller = config.family == "labeller"
    head = {
        "classifier": "classifier" if is_labeller else "classifier.out_proj",
        **pooler(config, "classifier.dense"),
    }
    return {**bert_weights("roberta.", SkipRows(config.pad_token_id)), **modules(head)}


ROBERTA = Family(
    title="RoBERTa, XLM-R, CamemBERT",
    model_types=("roberta", "xlm-roberta", "camembert"),
    fields=RobertaConfig,
    to_config=_config,
    weights=_weights,
    abilities=READS,
    body="roberta.",
    ignored=r"lm_head\..*|(roberta\.)?(pooler\..*|embeddings\.position_ids)",
)
