"""Plays decode calls of every number of rows, and a long row on several numbers of threads.

A kernel may compute otherwise from some number of rows on, or one row more than its tile has. With
more threads than a decoder has heads, onnxruntime may divide the keys of one long row among them;
`decoder_threads` keeps the engine from it, and what it lets through is tried here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from engine.slots.generation_sessions import decoder_threads
from exporter.prover.driver import (
    STEP,
    Asked,
    Replay,
    change,
    decode,
    empty,
    generate,
    joined,
    part_of,
)
from exporter.prover.generation_cases import Case, random_case
from exporter.prover.pair import MOST_TOP, Alone, GeneratingPair
from exporter.prover.plays.blocks import case_work
from exporter.samples import SEED

_NUM_CASES = 8  # the rows behind them are copies
_PROMPT_TOKENS = (2, 3, 4)  # one case after the other
_SOURCE_TOKENS = 5
_NUM_STEPS = 3  # the long row's
_FEW_ROWS = (1, 2, 3, 4, 8, 16, 17, 32)
_SHORT = 256  # tokens of the long row of a quick proof


def num_short_cases(num_rows: int) -> int:
    """Return how many different rows a call has, if there is room for so many."""
    return min(_NUM_CASES, num_rows)


def play_row_counts(pair: GeneratingPair, tried: Sequence[int]) -> Iterator[float]:
    """Decode so many rows in a call, one number after the other; yield the work of each part."""
    count = num_short_cases(pair.num_rows)
    cases = _short_cases(pair, count)
    found = pair.take_alone(cases, [pair.run_alone(case) for case in cases])
    yield count * STEP
    _fill_rows(pair, cases)
    rows = [found[row % count] for row in range(pair.num_rows)]
    alone = joined([part_of(one.seen, slice(-1, None)) for one in rows])
    for num_rows in tried:
        step = _decode(pair, rows[:num_rows])
        names = [f"{one.case}, row {i + 1} of {num_rows}" for i, one in enumerate(rows[:num_rows])]
        if not pair.judge.step_bits(step, part_of(alone, slice(num_rows)), names.__getitem__):
            for i, one in enumerate(rows[:num_rows]):  # copies do not count
                row, how = part_of(step, slice(i, i + 1)), f"row {i + 1} of {num_rows}"
                last = one.case.num_logits - 1
                pair.take_row("numbers of rows", row, one, last, how, counts=False)
        yield STEP


def row_counts(num_rows: int, buckets: Sequence[int], *, few: bool) -> list[int]:
    """Return numbers of rows; where calls are padded, the largest and least of each call."""
    if buckets:
        return sorted({1, *buckets, *(bucket + 1 for bucket in buckets[:-1])})
    return [n for n in range(1, num_rows + 1) if not few or n in _FEW_ROWS]


def play_threads(pair: GeneratingPair, tried: Sequence[int], *, few: bool) -> Iterator[float]:
    """Compute the longest sequence on several numbers of threads; yield the work of each run."""
    contract = pair.contract
    limit = min(contract.cache.max_len, _SHORT) if few else contract.cache.max_len
    prompt_length = max(1, limit + 1 - _NUM_STEPS)
    case = random_case(
        np.random.default_rng(SEED),
        contract,
        source_length=contract.cross_cache.max_len if contract.cross_cache else 0,
        prompt_length=prompt_length,
        num_tokens=limit - prompt_length + 1,
        banned=pair.judge.banned,
    )
    (alone,) = pair.take_alone([case], [pair.run_alone(case)])
    pair.unload()  # the graphs are loaded anew, and nothing is played behind this
    yield case_work(case)
    for num_threads in tried:
        runner = pair.load(num_threads, 1)
        (found,) = generate(runner, [case], Asked(pair.chunk, MOST_TOP), [alone.tokens])
        del runner  # before the next one takes memory
        how = f"alone on {num_threads} threads with {contract.num_heads} heads"
        pair.take_row("numbers of threads", found, alone, 0, how)
        yield case_work(case)


def thread_counts(contract: GenerationContract) -> list[int]:
    """Return one, two, and as many as the engine takes of one more than the decoder has heads."""
    wanted = (1, 2, contract.num_heads + 1)
    return sorted({decoder_threads(contract, number) for number in wanted})


def _short_cases(pair: GeneratingPair, count: int) -> list[Case]:
    rng, limit = np.random.default_rng(SEED), pair.contract.cache.max_len
    cases = []
    for i in range(count):
        case = random_case(
            rng,
            pair.contract,
            source_length=_SOURCE_TOKENS,
            prompt_length=max(1, min(_PROMPT_TOKENS[i % len(_PROMPT_TOKENS)], limit - 1)),
            num_tokens=1,
            banned=pair.judge.banned,
        )
        # A prompt that stands alone decodes its own token, a longer one another behind it.
        is_alone = bool(case.pieces(pair.chunk)[1])
        cases.append(case if is_alone else replace(case, num_tokens=2))
    return cases


def _fill_rows(pair: GeneratingPair, cases: Sequence[Case]) -> None:
    """Compute what stands before the tokens that are decoded; rows behind the cases are copies."""
    replay = Replay(pair.batch, cases, pair.asked())
    empty(pair.batch, has_source=pair.has_source)
    replay.encode(replay.places)
    replay.prefill(replay.places)
    copies = [(row % len(cases), row) for row in range(len(cases), pair.num_rows)]
    ops = [RowOp("copy", *copy) for copy in copies]
    change(pair.batch, ops + [RowOp("copy_source", *copy) for copy in copies if pair.has_source])


def _decode(pair: GeneratingPair, rows: Sequence[Alone]) -> StepLogits:
    """Cut the rows to what was computed before, and decode a token in each of them."""
    lengths = [one.case.num_computed(pair.chunk) for one in rows]
    change(pair.batch, [RowOp("cut", i, i, start=length) for i, length in enumerate(lengths)])
    tokens = [one.tokens[0] if one.case.num_tokens > 1 else one.case.prompt[-1] for one in rows]
    return decode(pair.batch, tokens, pair.asked(align_every=1), has_source=pair.has_source)
