"""The two sides of a generating model: its graphs, run as the engine runs them, and PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np

from engine.errors import CertificateError
from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from engine.slots.runner import SlotModelRunner
from exporter.prover.cases import NUM_TOPS, prefill_chunk
from exporter.prover.driver import (
    Asked,
    Place,
    Replay,
    change,
    empty,
    exported_graphs,
    generate,
    part_of,
)
from exporter.prover.eager import (
    Eager,
    EagerModel,
    Forward,
    alignment_of,
    alike,
    logits_of,
    num_parameters,
    waiting,
)
from exporter.prover.execution import Execution, load_for_cpu
from exporter.prover.generation_cases import Case, random_case
from exporter.prover.judge import At, Judge
from exporter.samples import SEED, Tokens

MOST_TOP = max(NUM_TOPS)
ALONE = "alone"
ALIGNMENT = "alignment"

_LEFT_BEHIND = 12  # tokens of a sequence that the first rows held before: some stay in memory
_NUM_LEFT = 16  # rows that hold such tokens: all would take gigabytes of a large model
_EDGE, _LAST_PLACE = 1, 5  # places in KINDS
_NUM_KEPT = 16  # results of the eager model: rows of a batch are copies of fewer cases


@dataclass(frozen=True)
class Alone:
    """The results of a case alone, and of the eager model."""

    case: Case
    tokens: Tokens  # that follow
    seen: StepLogits
    eager: Eager


class GeneratingPair:
    """The eager model, a runner for a case alone, a runner for batches, and who judges."""

    def __init__(
        self,
        eager: EagerModel,
        contract: GenerationContract,
        directory: Path,
        judge: Judge,
        execution: Execution,
    ) -> None:
        self.contract = contract
        self.judge = judge
        self.chunk = prefill_chunk(contract.cache.max_len)
        self.eager = eager
        self._directory = directory
        self._tops = cycle(NUM_TOPS)
        self._numbers: dict[Case, int] = {}

        def one(forward: Forward) -> Eager:
            return eager.run(forward, in_own=judge.needs_own)[0]

        self.eager_of_one = lru_cache(_NUM_KEPT)(
            lambda case, tokens: one(logits_of([case], [tokens]))
        )
        self._attended = lru_cache(_NUM_KEPT)(
            lambda case, tokens, width: one(alignment_of(case, tokens, width))
        )
        with exported_graphs():
            self.batch, self.alone = execution.load_runners(contract, directory)
        self.num_rows = self.batch.num_slots
        self._leave_behind()

    @property
    def has_source(self) -> bool:
        """Whether the model reads sources."""
        return self.contract.cross_cache is not None

    def load(self, num_threads: int, num_slots: int) -> SlotModelRunner:
        """Load the graphs for a CPU, for so many threads."""
        with exported_graphs():
            return load_for_cpu(self.contract, self._directory, num_threads, num_slots)

    def unload(self) -> None:
        """Give back what the graphs take; no more is run by them."""
        del self.batch, self.alone

    def asked(self, *, align_every: int = 0) -> Asked:
        """Return what to ask of a batch: the next number of likeliest tokens, in turn."""
        every = align_every if self.contract.alignment else 0
        return Asked(self.chunk, next(self._tops), every)

    def run_alone(
        self, case: Case, tokens: Tokens | None = None, *, chunk: int | None = None
    ) -> StepLogits:
        """Run a case in a row that holds zeros; `chunk` is else that of all."""
        ops = [RowOp("clear", 0, 0), *([RowOp("clear_source", 0, 0)] if case.source else [])]
        asked = Asked(
            self.chunk if chunk is None else chunk, MOST_TOP, int(self.contract.alignment)
        )
        change(self.alone, ops)
        (seen,) = generate(self.alone, [case], asked, [tokens] if tokens else None)
        least, most = int(seen.top_ids.min()), int(seen.top_ids.max())
        if least < 0 or most >= self.contract.vocab_size:  # no eager model knows such a token
            raise CertificateError(
                f"{case}: the exported model's likeliest tokens are {least} to {most}, outside the "
                f"vocabulary, 0 to {self.contract.vocab_size - 1}"
            )
        return seen._replace(logits=waiting(seen.all_logits))

    def take_alone(
        self,
        cases: Sequence[Case],
        seen: Sequence[StepLogits],
        tokens: Sequence[Tokens] | None = None,
    ) -> list[Alone]:
        """Judge what cases gave alone, followed by their likeliest tokens or by given ones."""
        if tokens is None:
            tokens = [case.chosen(one) for case, one in zip(cases, seen, strict=True)]
        rows = zip(cases, tokens, seen, self.eager_of(cases, tokens), strict=True)
        found = [Alone(*row) for row in rows]
        for one in found:
            self.take(ALONE, one.seen, one, ALONE)
        return found

    def take(
        self, play: str, seen: StepLogits, alone: Alone, how: str, *, counts: bool = True
    ) -> None:
        """Judge all positions of a case."""
        self.judge.step(play, seen, alone.eager, self.at(alone.case, how), counts=counts)

    def take_alignment(
        self, play: str, seen: StepLogits, alone: Alone, first: int, how: str
    ) -> None:
        """Judge the attention to the source behind positions of which it was asked."""
        assert seen.alignment is not None, "it was asked for"
        asked = (~np.isnan(seen.alignment[:, 0])).nonzero()[0]
        eager = self._attended(alone.case, alone.tokens, seen.alignment.shape[1])
        at = self.at(alone.case, how, first, len(seen.alignment)).part(asked)
        self.judge.numbers(play, ALIGNMENT, seen.alignment[asked], eager.part(first + asked), at)

    def take_row(
        self,
        play: str,
        seen: StepLogits,
        alone: Alone,
        first: int,
        how: str,
        *,
        counts: bool = True,
    ) -> None:
        """Hold positions of a case in a batch, from `first` on, against the case alone.

        If they may differ and do, they are judged as positions of their own play.
        """
        positions = slice(first, first + len(seen.logits))
        at = self.at(alone.case, how, first, len(seen.logits))
        if self.judge.step_bits(seen, part_of(alone.seen, positions), at.place):
            return
        self.judge.step(play, seen, alone.eager.part(positions), at, counts=counts)
        if seen.alignment is not None and not np.isnan(seen.alignment[:, 0]).all():
            self.take_alignment(play, seen, alone, first, how)

    def take_replayed(
        self, play: str, replay: Replay, number: int, alone: Alone, how: str, *, ends: bool = True
    ) -> None:
        """Hold what a replay gave of a case, its last positions or its first, against it alone."""
        if count := replay.num_seen(number):
            first = alone.case.num_logits - count if ends else 0
            self.take_row(play, replay.seen(number), alone, first, how)

    def eager_of(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Eager]:
        """Return what the eager model gives for all cases; those of like lengths run together."""
        found: dict[int, Eager] = {}
        for members in alike(cases, num_parameters(self.eager.model)):
            forward = logits_of([cases[i] for i in members], [tokens[i] for i in members])
            of_members = self.eager.run(forward, in_own=self.judge.needs_own)
            found |= zip(members, of_members, strict=True)
        return [found[i] for i in range(len(cases))]

    def at(self, case: Case, how: str, first: int = 0, count: int | None = None) -> At:
        """Return where positions of a case belong, all or `count` from `first` on."""
        size = case.num_logits if count is None else count
        places = case.first_logit + first + np.arange(size)
        steps = places - len(case.prompt) + 1
        kinds = np.clip(steps, -1, 2) + 1  # inside a prompt, at its end, first step, later
        kinds[kinds > 0] += 1
        within = (steps <= 0) & (places > 0) & (len(case.prompt) > self.chunk)
        kinds[within & np.isin(places % self.chunk, (0, self.chunk - 1))] = _EDGE
        kinds[places == self.contract.cache.max_len - 1] = _LAST_PLACE

        def place(i: int) -> str:
            where = f"step {steps[i]}" if steps[i] >= 0 else f"{-steps[i]} before the prompt's end"
            return f"{case}, {how}, {where}"

        number = self._numbers.setdefault(case, len(self._numbers))
        return At(np.full(size, number), np.full(size, case.length), kinds, place)

    def _leave_behind(self) -> None:
        """Let the first rows hold what an earlier sequence left there."""
        contract, rng = self.contract, np.random.default_rng(SEED)
        length = min(_LEFT_BEHIND, contract.cache.max_len)
        before = random_case(
            rng, contract, source_length=_LEFT_BEHIND, prompt_length=length, num_tokens=1
        )
        replay = Replay(self.batch, [before], Asked())
        empty(self.batch, has_source=self.has_source)
        replay.encode([Place(0, 0)])
        replay.prefill([Place(0, 0)])
        others = range(1, min(_NUM_LEFT, self.num_rows))
        copies = [RowOp("copy", 0, row) for row in others]
        copies += [RowOp("copy_source", 0, row) for row in others if self.has_source]
        change(self.batch, copies)
        empty(self.batch, has_source=self.has_source)
