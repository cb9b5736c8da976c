"""Dates as people write them, into ISO 8601: an encoder-decoder that trains in minutes."""

from __future__ import annotations

import datetime
import random
import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from exporter.models.config import TransformerConfig
from exporter.tasks.date_lines import draw_date, write_date
from exporter.training.data import Example
from exporter.training.task import Recipe, Task, accuracy_judge

PAD, BOS, EOS = "[PAD]", "[BOS]", "[EOS]"
CHUNK_LINES = 8192
HELD_OUT_LINES = 1000
VALIDATION_LINES = 1000
TOKENIZER_LINES = 20_000
PAIR_REPETITIONS = 200  # so that every pair of digits becomes a token, the rare ones too
VOCAB_SIZE = 1024

SAMPLES = (
    ("3rd of Feb, 1998", "1998-02-03"),
    ("tuesday 14 october 2031", "2031-10-14"),
    ("le 7 juillet 2004", "2004-07-07"),
    ("der 1. Mai 2015", "2015-05-01"),
    ("May 5th, '98", "1998-05-05"),
    ("14/10/2031", "2031-10-14"),
)


def dates_task(seed: int) -> Task:
    """Return the task; `seed` decides which lines it is trained on."""
    tokenizer = make_tokenizer()

    def chunk(number: int) -> list[Example]:
        rng = random.Random(f"dates/{seed}/{number}")
        return encode_lines(tokenizer, draw_lines(rng, CHUNK_LINES, part="training"))

    return Task(
        name="dates",
        config=_config(tokenizer),
        tokenizer=tokenizer,
        recipe=Recipe(
            steps=2400,
            batch_tokens=1024,
            peak_learning_rate=2.5e-3,
            warmup_steps=200,
            label_smoothing=0.05,
            average_decay=0.998,
            validate_every=300,
        ),
        chunks=chunk,
        validation=_fixed_lines(tokenizer, VALIDATION_LINES, part="validation"),
        held_out=_fixed_lines(tokenizer, HELD_OUT_LINES, part="held out"),
        selection="exact_match",
        judge=accuracy_judge("exact_match", "dates", 0.99),
        samples=SAMPLES,
    )


def part_of(date: datetime.date) -> str:
    """Return what a date is for: 4 % of the dates are never trained on, however written."""
    return {0: "held out", 1: "held out", 2: "validation", 3: "validation"}.get(
        zlib.crc32(date.isoformat().encode()) % 100, "training"
    )


def draw_lines(rng: random.Random, count: int, *, part: str) -> list[tuple[str, str]]:
    """Return `count` pairs of a line and its ISO date."""
    dates = _draw_dates(rng, part)
    return [(write_date(rng, date), date.isoformat()) for date in islice(dates, count)]


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer of both sides: two digits at most a token, words in few pieces.

    It is trained on lines that do not depend on the seed of a run. Case, accents and repeated
    spaces are dropped. A space belongs to the token that follows, so every separator costs
    nothing. Any text can be encoded: unknown words fall apart into bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace("’", "'"),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = draw_lines(random.Random("dates/tokenizer"), TOKENIZER_LINES, part="training")
    texts = [text for pair in lines for text in pair]
    texts += [f"{number:02} {number:02}" for number in range(100)] * PAIR_REPETITIONS
    tokenizer.train_from_iterator(texts, trainer)
    eos = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"$A {EOS}", special_tokens=[(EOS, eos)]
    )
    return tokenizer


def encode_lines(tokenizer: Tokenizer, lines: list[tuple[str, str]]) -> list[Example]:
    """Return lines and dates as token ids."""
    sources = tokenizer.encode_batch_fast([line for line, _ in lines])
    targets = tokenizer.encode_batch_fast([iso for _, iso in lines])
    return [
        Example(np.array(source.ids), np.array(target.ids))
        for source, target in zip(sources, targets, strict=True)
    ]


def _config(tokenizer: Tokenizer) -> TransformerConfig:
    return TransformerConfig(
        family="encoder-decoder",
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_encoder_layers=3,
        num_decoder_layers=2,
        norm_position="first",
        dropout=0.0,  # the lines never repeat, there is nothing to overfit to
        vocab_size=tokenizer.get_vocab_size(),
        max_source_len=64,
        max_target_len=16,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )


def _fixed_lines(tokenizer: Tokenizer, count: int, *, part: str) -> list[Example]:
    return encode_lines(tokenizer, draw_lines(random.Random(f"dates/{part}"), count, part=part))


def _draw_dates(rng: random.Random, part: str) -> Iterator[datetime.date]:
    while True:
        date = draw_date(rng)
        if part_of(date) == part:
            yield date
