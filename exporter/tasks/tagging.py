"""Part-of-speech tags: a sequence labeller on a grammar with ambiguous words."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from exporter.models.config import TransformerConfig
from exporter.tasks.tagged_sentences import TAGS, TaggedSentence, write_sentence
from exporter.tasks.words import UNKNOWN, word_tokenizer
from exporter.training.data import Example
from exporter.training.task import Recipe, Task, accuracy_judge

CHUNK_SENTENCES = 4096
HELD_OUT_SENTENCES = 1000
VALIDATION_SENTENCES = 500
VOCABULARY_SENTENCES = 10_000
UNKNOWN_RATE = 0.03  # of training words, so that unknown words get the tag that fits their place

SAMPLES = (
    ("I saw a saw", "PRON VERB DET NOUN"),
    ("They can fish", "PRON AUX VERB"),
    ("The can will fall", "DET NOUN AUX VERB"),
    ("Will Mary water the plants ?", "AUX PROPN VERB DET NOUN PUNCT"),
)


def tagging_task(seed: int) -> Task:
    """Return the task; `seed` decides which sentences it is trained on."""
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()

    def chunk(number: int) -> list[Example]:
        rng = random.Random(f"tagging/{seed}/{number}")
        sentences = draw_sentences(rng, CHUNK_SENTENCES, part="training")
        return [encode_sentence(vocabulary, _with_unknown_words(rng, s)) for s in sentences]

    return Task(
        name="tagging",
        config=TransformerConfig(
            family="labeller",
            d_model=64,
            num_heads=4,
            d_ff=256,
            num_encoder_layers=3,
            norm_position="first",
            dropout=0.0,  # the sentences never repeat, there is nothing to overfit to
            vocab_size=tokenizer.get_vocab_size(),
            max_source_len=64,
            labels=TAGS,
        ),
        tokenizer=tokenizer,
        recipe=Recipe(
            steps=900,
            batch_tokens=1024,
            peak_learning_rate=5e-3,
            warmup_steps=100,
            validate_every=150,
        ),
        chunks=chunk,
        validation=_fixed_sentences(vocabulary, VALIDATION_SENTENCES, part="validation"),
        held_out=_fixed_sentences(vocabulary, HELD_OUT_SENTENCES, part="held out"),
        selection="label_accuracy",
        judge=accuracy_judge("label_accuracy", "tokens", 0.99),
        samples=SAMPLES,
    )


def draw_sentences(rng: random.Random, count: int, *, part: str) -> list[TaggedSentence]:
    """Return sentences of the grammar; no sentence is in two parts."""
    return list(islice(_sentences(rng, part), count))


def part_of(sentence: TaggedSentence) -> str:
    """Return what a sentence is for, by a hash of its words: a fifth is never trained on."""
    words = " ".join(word for word, _ in sentence)
    return {0: "held out", 1: "validation"}.get(zlib.crc32(words.encode()) % 10, "training")


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a word of the grammar."""
    sentences = draw_sentences(
        random.Random("tagging/vocabulary"), VOCABULARY_SENTENCES, part="training"
    )
    return word_tokenizer(word for sentence in sentences for word, _ in sentence)


def encode_sentence(vocabulary: Mapping[str, int], sentence: TaggedSentence) -> Example:
    """Return token ids and the numbers of the tags."""
    ids = [vocabulary.get(word, vocabulary[UNKNOWN]) for word, _ in sentence]
    return Example(np.array(ids), np.array([TAGS.index(tag) for _, tag in sentence]))


def _with_unknown_words(rng: random.Random, sentence: TaggedSentence) -> TaggedSentence:
    return [(UNKNOWN if rng.random() < UNKNOWN_RATE else word, tag) for word, tag in sentence]


def _fixed_sentences(vocabulary: Mapping[str, int], count: int, *, part: str) -> list[Example]:
    sentences = draw_sentences(random.Random(f"tagging/{part}"), count, part=part)
    return [encode_sentence(vocabulary, sentence) for sentence in sentences]


def _sentences(rng: random.Random, part: str) -> Iterator[TaggedSentence]:
    while True:
        sentence = write_sentence(rng)
        if part_of(sentence) == part:
            yield sentence
