"""Any parallel text: an encoder-decoder that learns from pairs of lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from exporter.models.config import TransformerConfig
from exporter.tasks.own.baseline import WordByWord
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.parts import Parts
from exporter.tasks.own.rows import read_columns
from exporter.tasks.own.size import Size
from exporter.tasks.own.subwords import PAD, frame, train_subwords
from exporter.training.data import Example
from exporter.training.evaluation import Evaluation
from exporter.training.task import Outcome, Task

COLUMNS = ("source", "target")
BOS, EOS = "[BOS]", "[EOS]"
_MAX_CHARACTERS = 4096  # longer texts have more tokens too; counted before they are cut
_TOKENIZER_PAIRS = 500_000  # that the tokenizer is trained on
_WRITTEN = 200  # sentences that are translated to choose the best checkpoint
_NUM_SAMPLES = 6


Encode = Callable[[Sequence[str]], list[list[int]]]


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


def translation_task(seed: int, data: OwnData) -> Task:
    """Return the task of translating the first column of a file of pairs into the second.

    Both sides have one tokenizer. The best checkpoint has the highest chrF on validation pairs.
    Raises ConfigError for a file that is missing or wrong, naming its lines.
    """
    parts = data.divided(read_pairs, "\t".join)
    tokenizer, config = _start(data, parts.training)
    encode_target = _target_encoder(data, tokenizer, config)
    encoded = Parts(*(encode_pairs(tokenizer, encode_target, config, part) for part in parts))
    training, validation, held_out = ([example for _, example in part] for part in encoded)
    silent = [replace(example, text=None) for example in validation[_WRITTEN:]]
    kept = Parts(*([pair for pair, _ in part] for part in encoded))
    too_long = sum(map(len, parts)) - sum(map(len, kept))
    return data.task(
        "translation",
        seed,
        config,
        tokenizer,
        Parts(training, [*validation[:_WRITTEN], *silent], held_out),
        selection="chrf",
        judge=_judge(kept),
        samples=tuple(kept.held_out[:_NUM_SAMPLES]),
        data_summary=f"{kept}; {too_long:,} longer than the model allows are left out",
    )


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file, each once."""
    return list(dict.fromkeys(Pair(*row) for row in read_columns(path, COLUMNS)))


def make_tokenizer(pairs: Sequence[Pair], size: Size) -> Tokenizer:
    """Return a tokenizer of both sides that ends every text with EOS."""
    some = (pair for pair in pairs[:_TOKENIZER_PAIRS] if max(map(len, pair)) <= _MAX_CHARACTERS)
    texts = (text for pair in some for text in pair)
    tokenizer = train_subwords(texts, size.vocab_size, (BOS, EOS))
    frame(tokenizer, f"$A {EOS}", (EOS,))
    return tokenizer


def encode_pairs(
    tokenizer: Tokenizer,
    encode_target: Encode,
    config: TransformerConfig,
    pairs: Sequence[Pair],
) -> list[tuple[Pair, Example]]:
    """Return the pairs that the model has room for, with their token ids; targets as texts too."""
    short = [pair for pair in pairs if max(map(len, pair)) <= _MAX_CHARACTERS]
    sources = tokenizer.encode_batch_fast([pair.source for pair in short])
    targets = encode_target([pair.target for pair in short])
    encoded = [
        Example(np.array(source.ids), np.array(target), pair.target)
        for pair, source, target in zip(short, sources, targets, strict=True)
    ]
    return [
        (pair, example)
        for pair, example in zip(short, encoded, strict=True)
        if len(example.source) <= config.max_source_len
        and len(example.target) <= config.max_target_len
    ]


def _target_encoder(data: OwnData, tokenizer: Tokenizer, config: TransformerConfig) -> Encode:
    """Return what makes ids of targets; they begin and end as those that the model writes."""
    begin: tuple[int, ...] = ()
    if data.start is not None:
        tokenizer = data.start.target_tokenizer or tokenizer
        begin = data.start.config.generation.forced_begin
    end = [] if config.eos_token_id is None else [config.eos_token_id]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        # The tokenizer's own special tokens are those of a source: they may name its language.
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*begin, *encoding.ids, *end] for encoding in encodings]

    return encode


def _start(data: OwnData, pairs: Sequence[Pair]) -> tuple[Tokenizer, TransformerConfig]:
    """Return tokenizer and configuration of the model that learns."""
    start = data.started("encoder-decoder")
    if start is not None:
        assert start.tokenizer is not None, "an encoder-decoder has a tokenizer"
        return start.tokenizer, start.config.model
    tokenizer = make_tokenizer(pairs, data.shape)
    return tokenizer, TransformerConfig(
        architecture="encoder-decoder",
        **data.shape.options,
        num_decoder_layers=data.shape.num_decoder_layers,
        norm_position="first",
        vocab_size=tokenizer.get_vocab_size(),
        max_source_len=data.shape.max_len,
        max_target_len=data.shape.max_len,
        pad_token_id=tokenizer.get_vocab()[PAD],
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )


def _judge(parts: Parts[Pair]) -> Callable[[Evaluation], Outcome]:
    """Return a judge that compares the model with copying, and with a dictionary."""

    def judge(evaluation: Evaluation) -> Outcome:
        from exporter.likeness import likeness

        references = [pair.target for pair in parts.held_out]
        dictionary = WordByWord(parts.training)
        copied = likeness([pair.source for pair in parts.held_out], references)
        by_word = likeness([dictionary.translate(p.source) for p in parts.held_out], references)
        target = max(copied.chrf, by_word.chrf)
        summary = (
            f"chrF {evaluation.chrf:.1f}, BLEU {evaluation.bleu:.1f} on {len(references):,} "
            f"held-out lines; chrF of copying {copied.chrf:.1f}, word by word {by_word.chrf:.1f} "
            "(target: above both)"
        )
        metrics = {
            "chrf": evaluation.chrf,
            "bleu": evaluation.bleu,
            "loss": evaluation.loss,
            "chrf_of_copying": copied.chrf,
            "chrf_word_by_word": by_word.chrf,
        }
        return Outcome(metrics, summary, evaluation.chrf > target)

    return judge
