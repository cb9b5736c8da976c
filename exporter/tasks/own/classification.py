"""Texts with a label each: a BERT classifier on a person's own classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from engine.wording import listed
from exporter.models.config import FeedForwardConfig, PositionConfig, TransformerConfig
from exporter.tasks.own.baseline import commonest_label
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.labels import better_than, known_labels, telling
from exporter.tasks.own.parts import Parts
from exporter.tasks.own.rows import read_columns
from exporter.tasks.own.subwords import PAD, frame, train_subwords
from exporter.training.data import Example
from exporter.training.task import Task

COLUMNS = ("text", "label")
CLS, SEP = "[CLS]", "[SEP]"
_NUM_SAMPLES = 4


class LabelledText(NamedTuple):
    """A text and its class."""

    text: str
    label: str


def classification_task(seed: int, data: OwnData) -> Task:
    """Return the task of telling the labels of texts, the two columns of a file.

    Raises ConfigError for a file that is missing or wrong, naming its lines.
    """
    parts = data.divided(read_texts, lambda row: row.text)
    labels = known_labels(*([row.label for row in part] for part in parts))
    tokenizer, config = _start(data, parts.training, labels)
    return data.task(
        "classification",
        seed,
        config,
        tokenizer,
        Parts(*(encode_texts(tokenizer, config, part) for part in parts)),
        selection="exact_match",
        judge=better_than(
            commonest_label(
                [row.label for row in parts.training], [row.label for row in parts.held_out]
            ),
            "texts",
            "the most frequent label alone",
        ),
        samples=tuple(parts.held_out[:_NUM_SAMPLES]),
        data_summary=f"{parts}; {len(labels)} labels: {listed(labels)}",
    )


def read_texts(path: Path) -> list[LabelledText]:
    """Return the texts of a file, each once."""
    return list(dict.fromkeys(LabelledText(*row) for row in read_columns(path, COLUMNS)))


def encode_texts(
    tokenizer: Tokenizer, config: TransformerConfig, rows: Sequence[LabelledText]
) -> list[Example]:
    """Return texts as token ids, cut to what the model takes, and the numbers of their labels."""
    numbers = {label: number for number, label in enumerate(config.labels)}
    tokenizer.enable_truncation(config.max_source_len)
    encodings = tokenizer.encode_batch_fast([row.text for row in rows])
    tokenizer.no_truncation()
    return [
        Example(np.array(encoding.ids), np.array([numbers[row.label]]))
        for encoding, row in zip(encodings, rows, strict=True)
    ]


def _start(
    data: OwnData, rows: Sequence[LabelledText], labels: tuple[str, ...]
) -> tuple[Tokenizer, TransformerConfig]:
    """Return tokenizer and configuration of the model that learns."""
    start = data.started("encoder")
    if start is not None:
        assert start.tokenizer is not None, "a classifier of texts has a tokenizer"
        return start.tokenizer, telling(start.config.model, labels)
    tokenizer = train_subwords((row.text for row in rows), data.shape.vocab_size, (CLS, SEP))
    frame(tokenizer, f"{CLS} $A {SEP}", (CLS, SEP))
    return tokenizer, TransformerConfig(
        architecture="encoder",
        **data.shape.options,
        feed_forward=FeedForwardConfig(activation="gelu"),
        vocab_size=tokenizer.get_vocab_size(),
        max_source_len=data.shape.max_len,
        positions=PositionConfig(kind="learned"),
        scale_embeddings=False,
        embedding_norm=True,
        pad_token_id=tokenizer.get_vocab()[PAD],
        labels=labels,
    )
