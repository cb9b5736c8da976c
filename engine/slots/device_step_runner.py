"""Runs whole steps on slots of a device, which computes one while the host sees to others."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

from engine.sampling.draws import BeamDraw
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

    The likeliest tokens, and those that the package's graphs for draws draw, go into the next step
    without the host, so that it can be queued before this one is looked at. What else is drawn is
    drawn when the step is collected; whole rows of logits that it reads are brought to the host
    before the next step overwrites them. A step behind which none may follow is done when it is
    submitted, as in lockstep.
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
        whole_rows = _whole_rows(step)
        is_done_now = _needs_host(step, has_draws=has_draws)
        is_done_now |= bool(whole_rows) and not step.may_be_followed
        pending = self.model.start(batch, draws, () if is_done_now else whole_rows)
        self._rows = step.plain_draws.rows
        num_padding = self.model.num_padding - before
        queued = _UnderWay(step, pending, num_padding, perf_counter() - started)
        self._steps.append(self._result(queued) if is_done_now else queued)

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
    """Say whether the host chooses a token that is to be fed, or scores whole chunks."""
    return bool(step.scores) or (step.plain_draws.sampled is not None and not has_draws)


def _whole_rows(step: Step) -> list[int]:
    """Return which rows of logits the draws of a step may read, beside their likeliest tokens."""
    found: set[int] = set()
    for draw in step.draws:
        if reads_rows(draw):
            members = draw.beams if isinstance(draw, BeamDraw) else (draw,)
            found.update(member.logits_row for member in members)
    return sorted(found)
