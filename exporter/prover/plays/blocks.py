"""Plays every case alone, its prompt in one piece, beside other prompts, and in a batch.

Every case runs alone in a clean row, on one thread. Then up to eight compute their prompts beside
each other and a row that decodes, on all threads and in rows that hold what others left in them;
copies of these rows decode in groups of every size. The eager model's side is a plain forward pass
over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.slots.batch import RowOp
from exporter.prover.cases import BATCH_SIZES
from exporter.prover.driver import STEP, WHOLE, Asked, Place, Replay, change, empty
from exporter.prover.generation_cases import Case, first_of_each_length
from exporter.prover.pair import ALONE, Alone, GeneratingPair

NUM_ALIGNED = 8  # cases whose attention is compared, at most

_BLOCK_LOGITS = 2**24  # numbers of a block of cases in memory, if it has a wave at least
_WAVE = max(BATCH_SIZES)  # cases that compute their prompts beside each other
_ALIGN_EVERY = {2: 0, 5: 2, 8: 1}  # by the number of rows


def play_blocks(
    pair: GeneratingPair, cases: Sequence[Case], in_batch: Sequence[Case]
) -> Iterator[float]:
    """Play cases, of which some come in batches, too; yield the work of each part."""
    # As many as have room in memory with their logits, in whole waves.
    most = max(case.num_logits for case in cases) * pair.contract.vocab_size
    of_block = max(1, _BLOCK_LOGITS // most // _WAVE) * _WAVE
    aligned = choose_aligned(cases) if pair.contract.alignment else []
    in_one_piece = [c for c in first_of_each_length(cases) if len(c.prompt) > pair.chunk]

    def play(block: Sequence[Case]) -> Iterator[float]:
        seen = []
        for case in block:
            seen.append(pair.run_alone(case))
            yield case_work(case)
        found = pair.take_alone(block, seen)
        yield sum(map(_eager_work, block))
        for alone in found:
            if alone.case in aligned:
                pair.take_alignment(ALONE, alone.seen, alone, 0, ALONE)
            if alone.case in in_one_piece:
                whole = pair.run_alone(alone.case, alone.tokens, chunk=WHOLE)
                pair.take("prompt in one piece", whole, alone, "alone, prompt in one piece")
                yield case_work(alone.case)
        members = [one for one in found if one.case in in_batch] if pair.num_rows > 1 else []
        # As many rows hold prompts as decode behind copies of them.
        size = max(1, min(_WAVE, pair.num_rows // 2))
        for first in range(0, len(members), size):
            wave = members[first : first + size]
            _play_wave(pair, wave, size)
            yield sum(case_work(one.case) for one in wave)

    for start in range(0, len(cases), of_block):  # a block's logits are given back at its end
        yield from play(cases[start : start + of_block])


def blocks_work(cases: Sequence[Case], in_batch: Sequence[Case], chunk: int) -> float:
    """Return the work of all parts."""
    in_one_piece = [case for case in first_of_each_length(cases) if len(case.prompt) > chunk]
    runs = [*cases, *in_one_piece, *in_batch]
    return sum(map(case_work, runs)) + sum(map(_eager_work, cases))


def choose_aligned(cases: Sequence[Case]) -> list[Case]:
    """Return cases with sources of all lengths, some of them with a given prefix."""
    ordered = sorted(cases, key=lambda case: (len(case.prompt) > 1, len(case.source)))
    places = np.linspace(0, len(ordered) - 1, min(NUM_ALIGNED, len(ordered))).astype(int)
    return [ordered[place] for place in places]


def case_work(case: Case) -> float:
    """Return the work of a run of a case."""
    return len(case.source) + len(case.prompt) + STEP * case.num_tokens


def _eager_work(case: Case) -> float:
    return 1.5 * sum(case.lengths)


def _play_wave(pair: GeneratingPair, members: Sequence[Alone], size: int) -> None:
    """Compute prompts beside each other, and decode behind them in groups of every size.

    While there are prompts another row decodes; where calls are padded, it writes behind them.
    """
    held = [Place(size + i, size + i) for i in range(len(members))]
    replay = _replay(pair, members, pair.asked(align_every=1))
    empty(pair.batch, has_source=pair.has_source)
    replay.encode(held)
    replay.prefill(held, beside=[0])
    play = "prompts beside each other"
    how = f"prompt beside {len(members) - 1} others, in chunks of {pair.chunk}"
    for number, one in enumerate(members):
        pair.take_replayed(play, replay, number, one, how, ends=False)
    for batch_size in BATCH_SIZES:
        for first in range(0, len(members), batch_size):
            part = slice(first, first + batch_size)
            _play_group(pair, members[part], held[part], batch_size)


def _play_group(
    pair: GeneratingPair, members: Sequence[Alone], held: Sequence[Place], size: int
) -> None:
    """Decode in copies of the rows that hold the prompts.

    In groups of five the first copy ends with a whole chunk, and the prompt's rest is computed.
    """
    replay = _replay(pair, members, pair.asked(align_every=_ALIGN_EVERY[size]))
    places = replay.places
    ops, starts = [], []
    for number, (one, origin, place) in enumerate(zip(members, held, places, strict=True)):
        case, cut = one.case, size == 5 and number == 0
        length = case.num_reusable(pair.chunk) if cut else case.num_computed(pair.chunk)
        ops.append(RowOp("copy", origin.row, place.row, 0, length))
        if case.source:
            ops.append(RowOp("copy_source", origin.source_row, place.source_row))
        starts.append(length)
    change(pair.batch, ops)
    replay.prefill(places, starts)
    replay.decode()
    for number, one in enumerate(members):
        pair.take_replayed("batches", replay, number, one, f"in a batch of {len(members)}")


def _replay(pair: GeneratingPair, members: Sequence[Alone], asked: Asked) -> Replay:
    cases, tokens = [one.case for one in members], [one.tokens for one in members]
    return Replay(pair.batch, cases, asked, tokens)
