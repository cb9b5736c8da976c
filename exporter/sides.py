"""The two sides of a certificate of a generating model: the eager model, and its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from torch import nn

from engine.batch import RowOp, StepLogits
from engine.model_runner import SlotModelRunner
from engine.package import GenerationContract
from engine.threads import decoder_threads
from exporter.cases import MOST_ROWS, NUM_TOPS, Tokens, prefill_chunk
from exporter.comparison import Comparison, Floats, exported_graphs
from exporter.eager import eager_logits
from exporter.generation_cases import Case
from exporter.replay import WHOLE, Asked, generate, part_of

MOST_TOP = max(NUM_TOPS)

_LEFT_BEHIND = 1e4  # in the first rows of a batch, before their first sequence
_NUM_LEFT = 16  # of these rows: all of them would take gigabytes of a large model
_SMALL = 2**26  # bytes of a decoder's weights: below, threads gain nothing for one row
_EAGER_LOGITS = 2**24  # computed at a time, to bound the memory


class Sides:
    """The eager model, a runner for a case alone, a runner for batches, and what was found so far.

    A case alone runs on one thread, a batch on all that the engine would take: a row depends on
    neither. Where one thread would take much longer, both share the graphs, and their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: GenerationContract,
        directory: Path,
        comparison: Comparison,
    ) -> None:
        self.model = model
        self.contract = contract
        self.comparison = comparison
        self.chunk = prefill_chunk(contract.cache.max_len)
        self._directory = directory
        self._tops = cycle(NUM_TOPS)
        is_small = (directory / "decoder.onnx.data").stat().st_size < _SMALL
        with exported_graphs():
            self.batch = self.load(decoder_threads(contract), MOST_ROWS)
            self.alone = self.load(1, 1) if is_small else self.batch.beside(num_slots=1)
        cache = self.batch.cache
        for layer in (*cache.layers, *cache.cross_layers):
            for rows in layer:
                rows[:_NUM_LEFT] = 127 if rows.dtype == np.int8 else _LEFT_BEHIND

    def load(self, num_threads: int, num_slots: int) -> SlotModelRunner:
        """Load the graphs as the engine does."""
        encoder = self._directory / "encoder.onnx" if self.contract.cross_cache else None
        decoder = self._directory / "decoder.onnx"
        return SlotModelRunner.load(
            self.contract, decoder, encoder, num_slots=num_slots, num_threads=num_threads
        )

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
        self.alone.cache.apply(ops)
        with exported_graphs():
            return generate(self.alone, [case], asked, [tokens] if tokens else None)[0]

    def eager(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """Return the eager model's logits of all cases, [num_logits, vocab_size] each."""
        longest = max(len(case.prompt) + case.num_tokens for case in cases)
        size = max(1, _EAGER_LOGITS // (longest * self.contract.vocab_size))
        found: list[Floats] = []
        for i in range(0, len(cases), size):
            found += eager_logits(self.model, cases[i : i + size], tokens[i : i + size])
        return found

    def compare(self, seen: StepLogits, eager: Floats, case: Case, how: str) -> None:
        """Hold what a case gave alone against the eager model."""
        self.comparison.step(seen, eager, step_of(case, how))

    def compare_bits(
        self, seen: StepLogits, alone: StepLogits, eager: Floats, first: int, case: Case, how: str
    ) -> None:
        """Hold what a case gave in a batch, from its position `first` on, against it alone.

        Where a format may depend on the batch and does, it is held against the eager model too.
        """
        place = step_of(case, how, first)
        positions = slice(first, first + len(seen.logits))
        if not self.comparison.step_bits(seen, part_of(alone, positions), place):
            self.comparison.step(seen, eager[positions], place)


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
