"""Compares steps with future tokens to steps that the host gives their tokens: the bits agree.

A step is begun before the one before it is looked at, and takes the tokens that that one chooses,
the likeliest or drawn ones, from rows beside each other and from others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.errors import CertificateError
from engine.package.manifest import GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingGraph, SamplingInputs, Scope
from engine.sampling.truncation import Truncations
from engine.slots.batch import ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.prover.driver import begin, exported_graphs, run_step
from exporter.samples import SEED, Tokens

_MOST_ROWS = 8
_MOST_STEPS = 6
_NUM_TOPS = (1, 128)  # as captured steps have them

_Bits = list[bytes]


def certify_ahead(runner: SlotModelRunner, contract: GenerationContract) -> None:
    """Decode some rows in both ways; raise CertificateError where they do not agree."""
    for num_top in _NUM_TOPS:
        for kind in (None, *SamplingGraph) if runner.has_sampling_graphs else (None,):
            course = _Course(runner, contract, num_top, kind)
            what = "the likeliest" if kind is None else "drawn"
            with exported_graphs():
                in_turn, ahead = list(course.in_turn()), list(course.ahead())
            for number, (one, other) in enumerate(zip(in_turn, ahead, strict=True)):
                if one != other:
                    raise CertificateError(
                        f"step {number + 1} of {len(in_turn)} gives other bits with future tokens, "
                        f"{what} of {num_top}, than with tokens from the host"
                    )


class _Course:
    """Steps behind each other, each of which decodes what the one before chooses."""

    def __init__(
        self,
        runner: SlotModelRunner,
        contract: GenerationContract,
        num_top: int,
        kind: SamplingGraph | None,
    ) -> None:
        """`kind` is that of the graph for draws; None: the likeliest tokens are taken."""
        rng, k = np.random.default_rng(SEED), min(num_top, contract.vocab_size)
        self._runner, self._contract = runner, contract
        self._num_rows = B = min(_MOST_ROWS, runner.num_slots)
        self._batch = ScheduledBatch(
            decode_ids=tuple(rng.integers(0, contract.vocab_size, B).tolist()),
            decode_sources=(0,) * B if contract.cross_cache else (),
            num_top=num_top,
        )
        num_steps = min(_MOST_STEPS, contract.cache.max_len)
        how = Truncations.of([SamplingParams("sampling")] * B, [k] * B)
        scopes = np.full(B, Scope.GO_ON if kind else Scope.NOTHING)
        self._draws = [
            None if kind is None else SamplingInputs(np.arange(B), how, rng.random(B), scopes, kind)
            for _ in range(num_steps)
        ]

    def in_turn(self) -> Iterator[_Bits]:
        """Wait for every step, and give the next one its tokens."""
        begin(self._runner, self._contract)
        ids: Tokens = self._batch.decode_ids
        for number, draws in enumerate(self._draws):
            batch = self._batch._replace(decode_ids=ids)
            step = run_step(self._runner, batch, draws)
            chosen = (step.top_ids[:, 0] if step.drawn is None else step.drawn.ids).tolist()
            ids = tuple([chosen[row] for row in self._origins(number + 1)])
            yield _bits(step)

    def ahead(self) -> Iterator[_Bits]:
        """Begin every step before the one before it is waited for."""
        begin(self._runner, self._contract)
        pending = self._runner.start(self._batch, self._draws[0])
        for number, draws in enumerate(self._draws[1:], 1):
            batch = self._batch._replace(future_tokens=self._origins(number))
            following = self._runner.start(batch, draws)
            yield _bits(pending())
            pending = following
        yield _bits(pending())

    def _origins(self, number: int) -> Tokens:
        """Return from which row each one takes its token in a step: its own, or another."""
        rows = range(self._num_rows)
        return tuple(rows) if number % 2 else (*rows[::-2], *rows[-2::-2])


def _bits(step: StepLogits) -> _Bits:
    found = [step.top_ids, step.top_logits, step.top_logprobs]
    return [array.tobytes() for array in (*found, *(step.drawn or ()))]
