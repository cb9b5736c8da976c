"""The families that are imported, a file each."""

from __future__ import annotations

from typing import Any

from exporter.huggingface.families.bert import BERT
from exporter.huggingface.families.distilbert import DISTILBERT
from exporter.huggingface.families.gpt2 import GPT2
from exporter.huggingface.families.llama import LLAMA
from exporter.huggingface.families.marian import MARIAN
from exporter.huggingface.families.roberta import ROBERTA
from exporter.huggingface.families.vit import DEIT, VIT
from exporter.huggingface.family import Family

FAMILIES: tuple[Family[Any], ...] = (
    MARIAN,
    GPT2,
    LLAMA,
    BERT,
    ROBERTA,
    DISTILBERT,
    VIT,
    DEIT,
)
