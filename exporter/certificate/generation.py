"""Compares a generating package with its eager model, step by step, through the engine's runner.

Every case runs alone in a clean row, on one thread. Then up to eight compute their prompts beside
each other and a row that decodes, on all threads and in rows that hold what others left in them;
copies of these rows decode in groups of every size. A few short rows decode with every number of
rows that a step may have. Sources are encoded in groups, beams share a source, and a row is decoded
on several numbers of threads. The other side is the eager model's plain forward pass over the whole
sequence: no code of it knows of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from exporter.certificate.alignment import check_alignment, choose_cases
from exporter.certificate.beams import certify_beams
from exporter.certificate.cases import (
    BATCH_SIZES,
    MAX_PER_LENGTH,
    NUM_TOPS,
    Covered,
    Progress,
    affordable_prompts,
    affordable_steps,
)
from exporter.certificate.draws import certify_draws
from exporter.certificate.driver import WHOLE, Asked, Place, Replay, change, empty
from exporter.certificate.generation_cases import Case, make_cases
from exporter.certificate.row_counts import certify_row_counts
from exporter.certificate.sides import Eager, Sides, chunks_of
from exporter.certificate.sources import certify_sources
from exporter.certificate.threads import certify_threads
from exporter.samples import SEED, Tokens

BLOCK_SIZE = 40  # cases compared together: a multiple of every batch size

_WAVE = max(BATCH_SIZES)  # cases that compute their prompts beside each other
_ALIGN_EVERY = {2: 0, 5: 2, 8: 1}  # of the rows of a batch, by its size


def certify_generation(
    sides: Sides, samples: Sequence[Tokens], progress: Progress
) -> tuple[int, Covered]:
    """Compare all cases; return their number and what they covered.

    `samples` are prompts (or sources) to try besides random ones. Raises CertificateError at the
    first difference that the comparison refuses.
    """
    model, contract = sides.model, sides.contract
    banned = sides.comparison.banned
    cases, per_length = affordable_cases(model, contract, samples, banned)
    covered: Covered = {
        "prompt_lengths": sorted({len(case.prompt) for case in cases}),
        "batch_sizes": [1, *BATCH_SIZES],
        "prefill_chunks": [WHOLE, sides.chunk],
        "prompts_per_length": per_length,
        "steps": max(case.num_tokens for case in cases),
        "top_k": sorted({min(k, contract.vocab_size) for k in NUM_TOPS}),
    }
    if banned:
        covered["banned_tokens"] = len(banned)
    if contract.cross_cache:
        sources = [case.source for case in cases]
        covered["source_lengths"] = sorted(set(map(len, sources)))
        covered["source_groups"] = certify_sources(sides, sources)
    num_beams, covered["beam_groups"] = certify_beams(sides)
    num_counted, covered["row_counts"] = certify_row_counts(sides)
    aligned = choose_cases(cases) if contract.alignment else []
    in_batch = cases if per_length == MAX_PER_LENGTH else _cheap_cases(cases, sides.chunk)
    _check_blocks(sides, cases, aligned, in_batch, progress)
    if contract.alignment:
        covered["alignment_cases"] = len(aligned)
    num_threaded = 0
    if not sides.batch.buckets:  # a device has no threads to choose
        covered["threads"] = certify_threads(sides, contract.num_heads)
        num_threaded = 1
    if sides.batch.has_draws:
        covered["draws"] = certify_draws(sides.batch, contract)
    covered["undecided_tokens"] = sides.comparison.tokens_undecided
    return len(cases) + num_beams + num_counted + num_threaded, covered


def affordable_cases(
    model: nn.Module,
    contract: GenerationContract,
    samples: Sequence[Tokens],
    banned: Tokens = (),
) -> tuple[list[Case], int]:
    """Return cases, shuffled, and how many of them have the same length.

    No `banned` token follows them.
    """
    num_parameters = sum(weight.numel() for weight in model.parameters())

    def num_tokens(per_length: int) -> int:
        cases = make_cases(contract, samples, per_length)
        return sum(len(case.source) + len(case.prompt) for case in cases)

    per_length = affordable_prompts(num_parameters, num_tokens)
    num_cases = len(make_cases(contract, samples, per_length))
    steps = affordable_steps(num_parameters, num_cases)
    cases = make_cases(contract, samples, per_length, steps, banned)
    np.random.default_rng(SEED).shuffle(cases)
    return cases, per_length


def _first_of_each_length(cases: Sequence[Case]) -> list[Case]:
    return list({len(case.prompt): case for case in reversed(cases)}.values())


def _cheap_cases(cases: Sequence[Case], chunk: int) -> list[Case]:
    """Return the cases of prompts that are no longer than a chunk, of others one of each length."""
    short = [case for case in cases if len(case.prompt) <= chunk]
    return short + [c for c in _first_of_each_length(cases) if len(c.prompt) > chunk]


def _check_blocks(
    sides: Sides,
    cases: Sequence[Case],
    aligned: Sequence[Case],
    in_batch: Sequence[Case],
    progress: Progress,
) -> None:
    chosen = _Chosen(aligned, in_batch, _first_of_each_length(cases))
    starts = range(0, len(cases), BLOCK_SIZE)
    blocks = [_Block(sides, cases[i : i + BLOCK_SIZE], chosen) for i in starts]
    total, done = sum(block.num_runs for block in blocks), 0
    for block in blocks:
        for num_runs in block.check():
            done += num_runs
            progress(done, total)


class _Chosen(NamedTuple):
    """The cases of which more is compared than what they give alone."""

    aligned: Sequence[Case]  # their attention to the source
    in_batch: Sequence[Case]
    whole: Sequence[Case]  # with their prompt in one piece


class _Block:
    """Cases whose logits are held in memory together."""

    def __init__(self, sides: Sides, cases: Sequence[Case], chosen: _Chosen) -> None:
        self._sides = sides
        self._cases = cases
        self._chosen = chosen
        has_room = sides.num_rows > 1
        self._in_batch = [i for i, case in enumerate(cases) if has_room and case in chosen.in_batch]
        self._tokens: list[Tokens] = []
        self._alone: list[StepLogits] = []
        self._eager: list[Eager] = []
        # As many rows hold prompts as decode behind copies of them.
        self._wave = max(1, min(_WAVE, sides.num_rows // 2))
        self.num_runs = len(cases) + len(self._in_batch)

    def check(self) -> Iterator[int]:
        """Compare all of the block; yield the number of runs after each part."""
        sides, cases = self._sides, self._cases
        for case in cases:
            seen = sides.run_alone(case)
            self._tokens.append(case.chosen(seen))
            self._alone.append(seen)
            yield 1
        self._eager = sides.eager(cases, self._tokens)
        for i, case in enumerate(cases):
            how = f"alone, {chunks_of(sides.chunk)}"
            sides.compare(self._alone[i], self._eager[i], case, how)
            if case in self._chosen.aligned:
                check_alignment(sides, case, self._tokens[i], self._alone[i], how)
        self._check_whole()
        wave = self._wave
        for first in range(0, len(self._in_batch), wave):
            members = self._in_batch[first : first + wave]
            self._check_wave(members)
            yield len(members)

    def _check_whole(self) -> None:
        """Compare prompts longer than a chunk in one piece too: of each length the first."""
        sides = self._sides
        for i, case in enumerate(self._cases):
            if len(case.prompt) > sides.chunk and case in self._chosen.whole:
                seen = sides.run_alone(case, self._tokens[i], chunk=WHOLE)
                sides.compare(seen, self._eager[i], case, f"alone, {chunks_of(WHOLE)}")

    def _check_wave(self, members: Sequence[int]) -> None:
        """Compute prompts beside each other, and decode behind them in groups of every size.

        While there are prompts another row decodes; where calls are padded, it writes behind them.
        """
        sides = self._sides
        held = [Place(self._wave + i, self._wave + i) for i in range(len(members))]
        asked = sides.asked(align_every=1)
        replay = self._replay(members, asked)
        how = f"prompt beside {len(members) - 1} others, {chunks_of(sides.chunk)}"
        empty(sides.batch, has_source=bool(self._cases[0].source))
        replay.encode(held)
        replay.prefill(held, beside=[0])
        self._check_bits(replay, members, how, from_start=True)
        for size in BATCH_SIZES:
            for first in range(0, len(members), size):
                part = slice(first, first + size)
                self._check_group(members[part], held[part], size)

    def _check_group(self, members: Sequence[int], held: Sequence[Place], size: int) -> None:
        """Decode in copies of the rows that hold the prompts.

        In groups of five the first copy ends with a whole chunk, and the prompt's rest is computed.
        """
        sides = self._sides
        replay = self._replay(members, sides.asked(align_every=_ALIGN_EVERY[size]))
        places = replay.places
        ops, starts = [], []
        for number, (i, origin, place) in enumerate(zip(members, held, places, strict=True)):
            case = self._cases[i]
            cut = size == 5 and number == 0
            length = case.num_reusable(sides.chunk) if cut else case.num_computed(sides.chunk)
            ops.append(RowOp("copy", origin.row, place.row, 0, length))
            if case.source:
                ops.append(RowOp("copy_source", origin.source_row, place.source_row))
            starts.append(length)
        change(sides.batch, ops)
        replay.prefill(places, starts)
        replay.decode()
        self._check_bits(replay, members, f"in a batch of {len(members)}", from_start=False)

    def _replay(self, members: Sequence[int], asked: Asked) -> Replay:
        cases, tokens = [self._cases[i] for i in members], [self._tokens[i] for i in members]
        return Replay(self._sides.batch, cases, asked, tokens)

    def _check_bits(
        self, replay: Replay, members: Sequence[int], how: str, *, from_start: bool
    ) -> None:
        for number, i in enumerate(members):
            count, case = replay.num_seen(number), self._cases[i]
            if count:
                first = 0 if from_start else case.num_logits - count
                self._sides.compare_bits(
                    replay.seen(number), self._alone[i], self._eager[i], first, case, how
                )
