"""The families that are imported, those that differ by a few options in one file."""

from __future__ import annotations

from exporter.huggingface.families.bart import BART, MBART
from exporter.huggingface.families.bert import BERT, ROBERTA
from exporter.huggingface.families.distilbert import DISTILBERT
from exporter.huggingface.families.gemma import GEMMA2, GEMMA3
from exporter.huggingface.families.gpt2 import GPT2
from exporter.huggingface.families.gpt_neox import GPT_NEOX
from exporter.huggingface.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from exporter.huggingface.families.marian import M2M_100, MARIAN, PEGASUS
from exporter.huggingface.families.modernbert import MODERNBERT
from exporter.huggingface.families.opt import OPT
from exporter.huggingface.families.t5 import MT5, T5
from exporter.huggingface.families.vit import DEIT, VIT
from exporter.huggingface.family import Family

FAMILIES: tuple[Family, ...] = (
    MARIAN,
    BART,
    MBART,
    M2M_100,
    PEGASUS,
    T5,
    MT5,
    GPT2,
    GPT_NEOX,
    OPT,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
    BERT,
    ROBERTA,
    DISTILBERT,
    MODERNBERT,
    VIT,
    DEIT,
)
