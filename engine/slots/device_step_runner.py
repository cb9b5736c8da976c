"""Runs whole steps on slots of a device, which computes one while the host sees to others."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

from engine.sampling.plain import Rows
from engine.sampling.random_stream import RandomStream
from engine.sampling.sampler import Sampler, reads_rows
from engine.scheduling.step import Step
from engine.scheduling.step_result import StepResult
from engine.slots.batch import RowLengths, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from engine.slots.step_block import Pending
from engine.slots.step_runner import chosen


class _UnderWay(NamedTuple):
    """A step that is queued on the device."""

    step: Step
    pending: Pending
    num_padding: int
    seconds: float  # that it took to queue it


class DeviceStepRunner:
    """A StepRunner for the places of a SlotKVCache; a step is queued when it is submitted.

    The likeliest tokens, and those that the package's graph for draws draws, go into the next step
    without the host, so that it can be queued before this one is looked at. What else is drawn, and
    logits that are read as whole rows, the next step has to wait for: such a step is done when it
    is submitted, as in lockstep.
    """

    feeds_ids = True

    def __init__(self, model: SlotModelRunner, sampler: Sampler) -> None:
        self.model = model
        self._sampler = sampler
        self._stream = RandomStream()
        self._rows: Rows = slice(0)  # of logits, that the last step chooses plainly from
        self._steps: deque[_UnderWay | StepResult] = deque()

    @property
    def has_result(self) -> bool:
        """Whether the earliest step is done, see StepRunner."""
        return bool(self._steps) and isinstance(self._steps[0], StepResult)

    def submit(self, step: Step) -> None:
        """Queue a step, see StepRunner."""
        batch, before = step.places, self.model.num_padding
        assert isinstance(batch, ScheduledBatch)
        started = perf_counter()
        if batch.fed:
            batch = batch._replace(fed=self._fed_rows(batch.fed))
        has_draws = self.model.has_draws
        draws = step.plain_draws.for_graph(self._stream) if has_draws else None
        pending = self.model.start(batch, draws)
        self._rows = step.plain_draws.rows
        num_padding = self.model.num_padding - before
        queued = _UnderWay(step, pending, num_padding, perf_counter() - started)
        needs_host = _needs_host(step, has_draws=has_draws)
        self._steps.append(self._result(queued) if needs_host else queued)

    def collect(self) -> StepResult:
        """Return what the earliest step has brought, see StepRunner."""
        earliest = self._steps.popleft()
        return earliest if isinstance(earliest, StepResult) else self._result(earliest)

    def contents(self) -> RowLengths:
        """Return how many tokens each row holds."""
        return self.model.row_lengths

    def reset(self) -> None:
        """Forget all sequences and steps, see StepRunner."""
        self._steps.clear()
        self.model.reset()

    def _result(self, queued: _UnderWay) -> StepResult:
        started = perf_counter()
        logits = queued.pending()
        seconds = queued.seconds + perf_counter() - started
        return chosen(self._sampler, queued.step, logits, seconds, queued.num_padding)

    def _fed_rows(self, fed: tuple[int, ...]) -> tuple[int, ...]:
        """Return the row of logits of the step before for each of its draws; -1: none is fed."""
        if isinstance(self._rows, slice):
            return fed
        rows = self._rows.tolist()
        return tuple([rows[k] if k >= 0 else -1 for k in fed])


def _needs_host(step: Step, *, has_draws: bool) -> bool:
    """Say whether the host chooses a token that is to be fed, or reads whole rows of logits."""
    sampled = step.plain_draws.sampled
    if step.scores or (sampled is not None and not (has_draws and sampled.suits_graph.all())):
        return True
    return any(reads_rows(draw) for draw in step.draws)
