"""The two sides of a certificate of a generating model: the eager model, and its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from engine.errors import CertificateError
from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from exporter.certificate.cases import NUM_TOPS, prefill_chunk
from exporter.certificate.comparison import Comparison, Floats, exported_graphs
from exporter.certificate.driver import (
    WHOLE,
    Asked,
    Place,
    Replay,
    Runner,
    change,
    empty,
    generate,
    part_of,
)
from exporter.certificate.eager import alike, eager_logits, rounded_logits
from exporter.certificate.execution import Execution, OnCpu, load_for_cpu
from exporter.certificate.generation_cases import Case, random_case
from exporter.certificate.half_comparison import Half
from exporter.certificate.random_rounding import Rounded
from exporter.samples import SEED, Tokens

MOST_TOP = max(NUM_TOPS)

_LEFT_BEHIND = 12  # tokens of a sequence that the first rows held before: some stay in memory
_NUM_LEFT = 16  # of these rows: all of them would take gigabytes of a large model
_ON_CPU = OnCpu()


class Eager(NamedTuple):
    """What the eager model gives for a case: in float64 and, to measure by, in half precision."""

    exact: Floats  # [num_logits, vocab_size]
    rounded: Rounded | None = None

    def part(self, positions: slice) -> Eager:
        """Return some of the positions."""
        rounded = self.rounded.part(positions) if self.rounded else None
        return Eager(self.exact[positions], rounded)

    @classmethod
    def joined(cls, parts: Sequence[Eager]) -> Eager:
        """Return the positions of several cases as one."""
        rounded = [part.rounded for part in parts if part.rounded]
        exact = np.concatenate([part.exact for part in parts])
        return cls(exact, Rounded.joined(rounded) if rounded else None)


class Sides:
    """The eager model, a runner for a case alone, a runner for batches, and what was found so far.

    With `half` logits are held to its bound besides; `model` is in float64 then.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: GenerationContract,
        directory: Path,
        comparison: Comparison,
        *,
        execution: Execution = _ON_CPU,
        half: Half | None = None,
    ) -> None:
        self.model = model
        self.contract = contract
        self.comparison = comparison
        self.chunk = prefill_chunk(contract.cache.max_len)
        self._directory = directory
        self._half = half
        self._tops = cycle(NUM_TOPS)
        with exported_graphs():
            self.batch, self.alone = execution.load_runners(contract, directory)
        self.num_rows = self.batch.num_slots
        self._leave_behind()

    def load(self, num_threads: int, num_slots: int) -> Runner:
        """Load the graphs for a CPU, for so many threads."""
        return load_for_cpu(self.contract, self._directory, num_threads, num_slots)

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
        self._check_ids(seen, case)
        return seen

    def check_alone(self, case: Case) -> tuple[StepLogits, Tokens, Eager]:
        """Hold a case alone against the eager model; return what it gave, its tokens, and that."""
        seen = self.run_alone(case)
        tokens = case.chosen(seen)
        (eager,) = self.eager([case], [tokens])
        self.compare(seen, eager, case, "alone")
        return seen, tokens, eager

    def _leave_behind(self) -> None:
        """Let the first rows hold what an earlier sequence left there."""
        contract, rng = self.contract, np.random.default_rng(SEED)
        has_source = contract.cross_cache is not None
        length = min(_LEFT_BEHIND, contract.cache.max_len)
        before = random_case(
            rng, contract, source_length=_LEFT_BEHIND, prompt_length=length, num_tokens=1
        )
        replay = Replay(self.batch, [before], Asked())
        empty(self.batch, has_source=has_source)
        replay.encode([Place(0, 0)])
        replay.prefill([Place(0, 0)])
        others = range(1, min(_NUM_LEFT, self.num_rows))
        copies = [RowOp("copy", 0, row) for row in others]
        copies += [RowOp("copy_source", 0, row) for row in others if has_source]
        change(self.batch, copies)
        empty(self.batch, has_source=has_source)

    def _check_ids(self, seen: StepLogits, case: Case) -> None:
        """Raise CertificateError for a token that the eager model does not know."""
        least, most = int(seen.top_ids.min()), int(seen.top_ids.max())
        if least < 0 or most >= self.contract.vocab_size:
            raise CertificateError(
                f"{case}: the exported model's likeliest tokens are {least} to {most}, outside the "
                f"vocabulary, 0 to {self.contract.vocab_size - 1}"
            )

    def eager(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Eager]:
        """Return what the eager model gives for all cases; those of like lengths run together."""
        found: dict[int, Eager] = {}
        for members in alike(cases):
            part = [cases[i] for i in members], [tokens[i] for i in members]
            exact = eager_logits(self.model, *part)
            rounded = rounded_logits(self._half.model, *part) if self._half else [None] * len(exact)
            found |= zip(members, map(Eager, exact, rounded), strict=True)
        return [found[i] for i in range(len(cases))]

    def compare(self, seen: StepLogits, eager: Eager, case: Case, how: str) -> None:
        """Hold what a case gave against the eager model."""
        self._compare(seen, eager, step_of(case, how))

    def compare_bits(
        self, seen: StepLogits, alone: StepLogits, eager: Eager, first: int, case: Case, how: str
    ) -> None:
        """Hold what a case gave in a batch, from its position `first` on, against it alone.

        Where a format may depend on the batch and does, it is held against the eager model too.
        """
        positions = slice(first, first + len(seen.logits))
        self.compare_rows(
            seen, part_of(alone, positions), eager.part(positions), step_of(case, how, first)
        )

    def compare_rows(
        self, seen: StepLogits, alone: StepLogits, eager: Eager, place: Callable[[int], str]
    ) -> None:
        """Do as `compare_bits` with rows of any cases; `place(i)` tells where row i comes from."""
        if not self.comparison.step_bits(seen, alone, place):
            self._compare(seen, eager, place)

    def _compare(self, seen: StepLogits, eager: Eager, place: Callable[[int], str]) -> None:
        self.comparison.step(seen, eager.exact, place)
        if self._half and eager.rounded:
            self._half.found.case(seen.all_logits, eager.exact, eager.rounded, place)


def step_of(case: Case, how: str, first: int = 0) -> Callable[[int], str]:
    """Return what tells where the logits of a case come from; its first position is `first`."""
    before = case.num_prompt_logits - 1

    def place(i: int) -> str:
        step = first + i - before
        where = f"step {step}" if step >= 0 else f"{-step} before the prompt's end"
        return f"{case}, {how}, {where}"

    return place


def chunks_of(chunk: int) -> str:
    """Return how a prompt was computed, in words."""
    return "whole prefill" if chunk == WHOLE else f"prefill in chunks of {chunk}"
