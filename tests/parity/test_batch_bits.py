"""A row's bits depend on no neighbour and no number of threads, at the widths of GPT-2 and Marian.

Rows are decoded alone on one thread, then in batches of every size on one, two and more threads
than heads: of mixed and of equal lengths, on both sides of the lengths at which kernels cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.sampling.logits import StepLogits
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.models import TransformerConfig
from exporter.models.config import FeedForwardConfig, PositionConfig
from tests.parity.bare import Bare, write_bare

VOCAB_SIZE, CHUNK, STEPS = 97, 128, 2
# 512 and 1,024: from there the attention may divide a row of heads of 64 among threads.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 700, 1023, 1024, 1025, 1090)
SOURCE_LENGTHS = (1, 7, 8, 25, 63, 64, 65, 120)
WIDTHS = {
    "gpt2": TransformerConfig(
        architecture="decoder",
        d_model=768,
        num_heads=12,
        d_ff=3072,
        num_decoder_layers=1,
        vocab_size=VOCAB_SIZE,
        max_target_len=1100,
        positions=PositionConfig(kind="learned"),
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
        norm_position="first",
    ),
    "marian": TransformerConfig(
        architecture="encoder-decoder",
        d_model=512,
        num_heads=8,
        d_ff=2048,
        num_encoder_layers=1,
        num_decoder_layers=1,
        vocab_size=VOCAB_SIZE,
        max_source_len=128,
        max_target_len=1100,
        bos_token_id=1,
    ),
}
FORMATS = {"fp32": ("fp32", "fp32"), "int8": ("int8", "fp32"), "int8 cache": ("int8", "int8")}
QUICK = {("gpt2", "fp32"), ("marian", "int8 cache")}
# The last are more than heads: rows are divided among them, and held against a row on one thread.
THREADS = [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 16]

Bits = tuple[bytes, ...]


class RowKind(NamedTuple):
    """The length and source of a row."""

    length: int
    source: int  # its number, for a model with an encoder


KINDS = [RowKind(length, i % len(SOURCE_LENGTHS)) for i, length in enumerate(LENGTHS)]
FEW_KINDS = [kind for kind in KINDS if kind.length in (65, 513, 1023, 1025, 1090)]


def cases(*widths: str) -> list[Any]:
    """Return models of these widths in every format; some of them take long."""
    return [
        pytest.param(case, id=" ".join(case), marks=() if case in QUICK else pytest.mark.long)
        for case in product(widths, FORMATS)
    ]


@pytest.fixture(scope="module", params=cases(*WIDTHS))
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    width, name = request.param
    weights, kv_cache = FORMATS[name]
    path = tmp_path_factory.mktemp("bits") / "graphs"
    return write_bare(WIDTHS[width], path, weights=weights, kv_cache=kv_cache)


class Rows:
    """A runner whose last row holds the longest prompt: the others are copies of its beginning."""

    def __init__(self, bare: Bare, num_rows: int, num_threads: int) -> None:
        self.has_source = bare.contract.cross_cache is not None
        self.runner = bare.load(num_slots=num_rows + 1, num_threads=num_threads)
        self._last = num_rows
        for chunk in _chunks(max(LENGTHS), self._last):
            self._run(chunks=(chunk,))

    def decode(self, kinds: Sequence[RowKind], *, beams: int = 1) -> list[Bits]:
        """Return what each row gives at every step; `beams` rows in turn share a source."""
        ops = [RowOp("copy", self._last, row, stop=kind.length) for row, kind in enumerate(kinds)]
        encodes = tuple(
            Encode(row, _source(kind.source)) for row, kind in enumerate(kinds[::beams])
        )
        self._run(row_ops=tuple(ops), encodes=encodes if self.has_source else ())
        found: list[list[bytes]] = [[] for _ in kinds]
        for step in range(STEPS):
            given = self._run(
                decode_ids=tuple((kind.length + step) % VOCAB_SIZE for kind in kinds),
                decode_sources=tuple(row // beams for row in range(len(kinds)))
                if self.has_source
                else (),
            )
            for row, bits in enumerate(found):
                bits += _bits(given, row)
        return [tuple(bits) for bits in found]

    def _run(self, **parts: object) -> StepLogits:
        return run(self.runner, **parts)


def run(runner: SlotModelRunner, **parts: object) -> StepLogits:
    return runner.run(ScheduledBatch(**parts, num_top=4))  # type: ignore[arg-type]


def _bits(given: StepLogits, row: int) -> Bits:
    arrays = (given.logits, given.top_ids, given.top_logits, given.top_logprobs)
    return tuple(array[row].tobytes() for array in arrays)


def _prompt() -> list[int]:
    return np.random.default_rng(1).integers(2, VOCAB_SIZE, max(LENGTHS)).tolist()


def _chunks(length: int, row: int) -> Iterator[PrefillChunk]:
    ids = _prompt()[:length]
    for start in range(0, length, CHUNK):
        yield PrefillChunk(row, tuple(ids[start : start + CHUNK]), num_logits=1, source_row=row)


def _source(number: int) -> tuple[int, ...]:
    drawn = np.random.default_rng(number).integers(2, VOCAB_SIZE, SOURCE_LENGTHS[number])
    return tuple(drawn.tolist())


@pytest.fixture(scope="module")
def alone(bare: Bare) -> Callable[[RowKind], Bits]:
    """The bits of a kind of row that runs alone, on one thread."""
    rows = Rows(bare, 1, 1)
    return cache(lambda kind: rows.decode([kind])[0])


def batches(kinds: Sequence[RowKind], sizes: Iterable[int]) -> Iterator[list[RowKind]]:
    """Yield batches of mixed lengths, in which every kind comes, and of equal lengths."""
    for size in sizes:
        for first in range(0, len(kinds), size):
            yield [kinds[(first + i) % len(kinds)] for i in range(size)]
        for kind in kinds[-2:]:
            yield [kind] * size


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_row_gives_the_same_bits_in_small_batches(
    bare: Bare, alone: Callable[[RowKind], Bits], num_threads: int
) -> None:
    rows = Rows(bare, 3, num_threads)

    for kinds in batches(FEW_KINDS, (1, 3)):
        assert rows.decode(kinds) == [alone(kind) for kind in kinds], kinds


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_a_row_gives_the_same_bits_in_batches_of_every_size(
    bare: Bare, alone: Callable[[RowKind], Bits], num_threads: int
) -> None:
    rows = Rows(bare, 32, num_threads)

    for kinds in batches(KINDS, (1, 2, 3, 8, 16, 32)):
        assert rows.decode(kinds) == [alone(kind) for kind in kinds], kinds


@pytest.mark.parametrize("bare", cases("marian"), indirect=True)  # others have rows alone
@pytest.mark.parametrize("num_threads", THREADS)
def test_a_beam_gives_the_bits_of_the_row_alone(
    bare: Bare, alone: Callable[[RowKind], Bits], num_threads: int
) -> None:
    rows = Rows(bare, 16, num_threads)

    for kind, width in product(FEW_KINDS[-1:], (2, 4, 8, 16)):
        assert rows.decode([kind] * width, beams=width) == [alone(kind)] * width, (kind, width)


@pytest.mark.parametrize("num_threads", THREADS)
def test_chunks_between_the_steps_of_others_give_the_bits_of_the_prompt_alone(
    bare: Bare, num_threads: int
) -> None:
    has_source = bare.contract.cross_cache is not None
    length = 2 * CHUNK + 5
    sources = (Encode(0, _source(6)), Encode(1, _source(6))) if has_source else ()
    solo = bare.load(num_slots=1, num_threads=1)
    run(solo, encodes=sources[:1])
    expected = [_bits(run(solo, chunks=(chunk,)), 0) for chunk in _chunks(length, 0)]

    runner = bare.load(num_slots=2, num_threads=num_threads)
    run(runner, encodes=sources)
    found = [
        _bits(run(runner, chunks=(chunk,), decode_ids=(5,), decode_sources=(0,) * has_source), 1)
        for chunk in _chunks(length, 1)
    ]

    assert found == expected
