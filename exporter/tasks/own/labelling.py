"""Sentences with a tag for every word: a labeller on a person's own tags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from engine.errors import ConfigError
from engine.lines import read_lines
from engine.wording import listed
from exporter.models.config import HeadConfig, TransformerConfig
from exporter.tasks.own.baseline import CommonestTag
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.labels import better_than, known_labels, telling
from exporter.tasks.own.parts import Parts
from exporter.tasks.own.rows import MAX_BYTES, BadLines
from exporter.tasks.own.subwords import PAD, train_subwords
from exporter.training.data import IGNORED, Example
from exporter.training.task import Task

_NUM_SAMPLES = 4
_DOCUMENT = "-DOCSTART-"  # begins a document in the files of CoNLL-2003

TaggedSentence = tuple[tuple[str, str], ...]


def labelling_task(seed: int, data: OwnData) -> Task:
    """Return the task of telling the tags of words, from a file in columns as CoNLL's.

    Every token of a word learns the tag of the word. Raises ConfigError for a file that is missing
    or wrong, naming its lines.
    """
    parts = data.divided(read_sentences, _words)
    labels = known_labels(*([tag for row in part for _, tag in row] for part in parts))
    tokenizer, config = _start(data, parts.training, labels)
    return data.task(
        "labelling",
        seed,
        config,
        tokenizer,
        Parts(*(encode_sentences(tokenizer, config, part) for part in parts)),
        selection="label_accuracy",
        judge=better_than(
            CommonestTag(parts.training).accuracy(_by_tokens(tokenizer, config, parts.held_out)),
            "tokens",
            "each word's most frequent tag",
            "label_accuracy",
        ),
        samples=tuple(
            (_words(row), " ".join(tag for _, tag in row)) for row in parts.held_out[:_NUM_SAMPLES]
        ),
        data_summary=f"{parts}; {len(labels)} tags: {listed(labels)}",
    )


def read_sentences(path: Path) -> list[TaggedSentence]:
    """Return the sentences of a file: a word a line, its tag in the last column, apart by spaces
    or tabs; empty lines part sentences, and before a sentence lines that begin with # are remarks.
    """
    lines = read_lines(path, MAX_BYTES)
    bad = BadLines(path)
    sentences: list[list[tuple[str, str]]] = [[]]
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or fields[0] == _DOCUMENT:
            sentences.append([])
        elif line.startswith("# ") and not sentences[-1]:
            continue
        elif len(fields) < 2:
            bad.add(number, f"{line.strip()[:40]!r} has no tag; wanted a word and its tag")
        else:
            sentences[-1].append((fields[0], fields[-1]))
    bad.check(len(lines))
    found = list(dict.fromkeys(tuple(sentence) for sentence in sentences if sentence))
    if found and all(sentence[0][0].partition("-")[0] == "1" for sentence in found):
        raise ConfigError(
            f"{path}: its first column numbers the words, as in CoNLL-U; give the word in the "
            f"first and its tag in the last, such as `cut -f 2,4 {path}` has them"
        )
    return found


def encode_sentences(
    tokenizer: Tokenizer, config: TransformerConfig, rows: Sequence[TaggedSentence]
) -> list[Example]:
    """Return the tokens of sentences, cut to what the model takes, and the numbers of their tags.

    Tokens that are put around a sentence have none.
    """
    numbers = {label: number for number, label in enumerate(config.labels)}
    return [
        Example(
            np.array(encoding.ids),
            np.array([IGNORED if i is None else numbers[row[i][1]] for i in encoding.word_ids]),
        )
        for encoding, row in zip(_encodings(tokenizer, config, rows), rows, strict=True)
    ]


def _by_tokens(
    tokenizer: Tokenizer, config: TransformerConfig, rows: Sequence[TaggedSentence]
) -> list[TaggedSentence]:
    """Return sentences with every word as often as it has tokens, as a model is judged."""
    return [
        tuple(row[i] for i in encoding.word_ids if i is not None)
        for encoding, row in zip(_encodings(tokenizer, config, rows), rows, strict=True)
    ]


def _encodings(
    tokenizer: Tokenizer, config: TransformerConfig, rows: Sequence[TaggedSentence]
) -> list[Encoding]:
    tokenizer.enable_truncation(config.max_source_len)
    encodings = tokenizer.encode_batch(
        [[word for word, _ in row] for row in rows], is_pretokenized=True
    )
    tokenizer.no_truncation()
    return encodings


def _words(sentence: TaggedSentence) -> str:
    return " ".join(word for word, _ in sentence)


def _start(
    data: OwnData, rows: Sequence[TaggedSentence], labels: tuple[str, ...]
) -> tuple[Tokenizer, TransformerConfig]:
    """Return tokenizer and configuration of the model that learns."""
    start = data.started("encoder")
    if start is not None:
        assert start.tokenizer is not None, "a labeller has a tokenizer"
        return start.tokenizer, telling(start.config.model, labels, each_token=True)
    tokenizer = train_subwords(map(_words, rows), data.shape.vocab_size, (), words_only=True)
    return tokenizer, TransformerConfig(
        architecture="encoder",
        **data.shape.options,
        norm_position="first",
        vocab_size=tokenizer.get_vocab_size(),
        max_source_len=data.shape.max_len,
        pad_token_id=tokenizer.get_vocab()[PAD],
        head=HeadConfig(each_token=True),
        labels=labels,
    )
