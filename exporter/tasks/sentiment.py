"""Praise or blame: a BERT classifier on a small grammar with negation."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer, processors

from exporter.models.config import TransformerConfig
from exporter.tasks.opinions import NEGATIVE, POSITIVE, write_opinion
from exporter.tasks.words import UNKNOWN, word_tokenizer
from exporter.training.data import Example
from exporter.training.task import Recipe, Task, accuracy_judge

LABELS = (NEGATIVE, POSITIVE)
CLS, SEP = "[CLS]", "[SEP]"
CHUNK_TEXTS = 4096
HELD_OUT_TEXTS = 1000
VALIDATION_TEXTS = 500
VOCABULARY_TEXTS = 10_000
UNKNOWN_RATE = 0.1  # of texts: one word more, that says nothing

SAMPLES = (
    ("The film was not good.", NEGATIVE),
    ("It was never boring!", POSITIVE),
    ("The food was awful, but we loved the place.", POSITIVE),
    ("I don't think that the service was friendly.", NEGATIVE),
)

RECIPE = Recipe(
    steps=1000,
    batch_tokens=2048,
    peak_learning_rate=1e-3,
    warmup_steps=150,
    label_smoothing=0.05,
    weight_decay=0.01,
    validate_every=200,
)


def sentiment_task(seed: int) -> Task:
    """Return the task; `seed` decides which texts it is trained on."""
    tokenizer = make_tokenizer()

    def chunk(number: int) -> list[Example]:
        rng = random.Random(f"sentiment/{seed}/{number}")
        texts = draw_texts(rng, CHUNK_TEXTS, part="training")
        unknown = tokenizer.get_vocab()[UNKNOWN]
        return [_with_unknown_word(rng, e, unknown) for e in encode_texts(tokenizer, texts)]

    return Task(
        name="sentiment",
        config=_config(tokenizer),
        tokenizer=tokenizer,
        recipe=RECIPE,
        chunks=chunk,
        validation=_fixed_texts(tokenizer, VALIDATION_TEXTS, part="validation"),
        held_out=_fixed_texts(tokenizer, HELD_OUT_TEXTS, part="held out"),
        selection="exact_match",
        judge=accuracy_judge("exact_match", "texts", 0.98),
        samples=SAMPLES,
    )


def _config(tokenizer: Tokenizer) -> TransformerConfig:
    return TransformerConfig(
        family="bert",
        d_model=64,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=3,
        activation="gelu",
        dropout=0.1,
        norm_eps=1e-12,
        vocab_size=tokenizer.get_vocab_size(),
        max_source_len=128,
        positions="learned",
        scale_embeddings=False,
        embedding_norm=True,
        num_token_types=2,
        labels=LABELS,
    )


def draw_texts(rng: random.Random, count: int, *, part: str) -> list[tuple[str, str]]:
    """Return texts and their labels; no text is in two parts."""
    return list(islice(_texts(rng, part), count))


def part_of(text: str) -> str:
    """Return what a text is for, by a hash of it: a fifth is never trained on."""
    return {0: "held out", 1: "validation"}.get(zlib.crc32(text.lower().encode()) % 10, "training")


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a word of the grammar, framed as BERT wants it."""
    texts = draw_texts(random.Random("sentiment/vocabulary"), VOCABULARY_TEXTS, part="training")
    split = word_tokenizer(())
    words = (
        word for text, _ in texts for word, _ in split.pre_tokenizer.pre_tokenize_str(text.lower())
    )
    tokenizer = word_tokenizer(words, specials=(CLS, SEP))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)],
    )
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> list[Example]:
    """Return texts as token ids with the numbers of their labels."""
    encodings = tokenizer.encode_batch_fast([text for text, _ in texts])
    return [
        Example(np.array(encoding.ids), np.array([LABELS.index(label)]))
        for encoding, (_, label) in zip(encodings, texts, strict=True)
    ]


def _with_unknown_word(rng: random.Random, example: Example, unknown: int) -> Example:
    if rng.random() >= UNKNOWN_RATE:
        return example
    place = rng.randrange(1, len(example.source))
    source = [*example.source[:place], unknown, *example.source[place:]]
    return Example(np.array(source), example.target)


def _fixed_texts(tokenizer: Tokenizer, count: int, *, part: str) -> list[Example]:
    return encode_texts(tokenizer, draw_texts(random.Random(f"sentiment/{part}"), count, part=part))


def _texts(rng: random.Random, part: str) -> Iterator[tuple[str, str]]:
    while True:
        label = rng.choice(LABELS)
        text = write_opinion(rng, label)
        if part_of(text) == part:
            yield text, label
