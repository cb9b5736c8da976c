"""Runs whole steps on slots: what the model gives, and what is chosen behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

from engine.sampling.draws import BeamExpansion
from engine.sampling.plain import PlainChoices, Rows
from engine.sampling.random_stream import RandomStream
from engine.sampling.sampler import Sampler, reads_rows
from engine.scheduling.step import Step, StepResult
from engine.slots.batch import RowLengths, ScheduledBatch
from engine.slots.runner import ModelRunner
from engine.slots.step_block import Pending


class SlotStepRunner:
    """A StepRunner for the places of a SlotKVCache.

    A step on the host is done when it is submitted. A step on a device is queued: the likeliest
    tokens, and those that the package's graphs for draws draw, go into the next step without the
    host, so that it can be queued before this one is looked at. All other draws are made when the
    step is collected; whole rows of logits that they read are brought to the host before the next
    step overwrites them. A step that none may follow is done when it is submitted there, too.
    """

    def __init__(self, model: ModelRunner, sampler: Sampler, *, overlaps: bool = False) -> None:
        """`overlaps` is for a host that stands in for a device: nothing is won there otherwise."""
        self.model = model
        self._is_on_device = model.is_on_device
        self.overlaps = overlaps or model.is_on_device
        self._sampler = sampler
        self._stream = RandomStream()
        self._rows: Rows = slice(0)  # logits that the plain draws of the last step are from
        self._last_ids: list[int] = []  # the last step's tokens, if it is done
        self._steps: deque[Callable[[], StepResult] | StepResult] = deque()

    @property
    def has_result(self) -> bool:
        """Whether the earliest step is done for which a device would wait, see StepRunner."""
        is_done = bool(self._steps) and isinstance(self._steps[0], StepResult)
        return is_done and self._is_on_device

    def submit(self, step: Step) -> None:
        """Run or queue a step, see StepRunner."""
        model, batch = self.model, step.slot_mapping
        assert isinstance(batch, ScheduledBatch)
        started, before = perf_counter(), model.num_padding
        draws, whole_rows, is_done_now = None, [], True
        if batch.future_tokens:
            batch = self._with_tokens(batch)
        if self._is_on_device:
            draws = step.sampling_batch.for_graph(self._stream)
            whole_rows = _whole_rows(step)
            # The host scores whole chunks, or goes in turn.
            is_done_now = bool(step.scores) or (bool(whole_rows) and not step.may_be_followed)
        pending = model.start(batch, draws, () if is_done_now else whole_rows)
        seconds, num_padding = perf_counter() - started, model.num_padding - before
        self._rows = step.sampling_batch.rows
        if is_done_now:
            result = self._result(step, pending, num_padding, seconds)
            self._last_ids = result.plain.token_ids
            self._steps.append(result)
        else:
            self._steps.append(partial(self._result, step, pending, num_padding, seconds))

    def collect(self) -> StepResult:
        """Return what the earliest step has brought, see StepRunner."""
        earliest = self._steps.popleft()
        return earliest if isinstance(earliest, StepResult) else earliest()

    def snapshot(self) -> RowLengths:
        """Return how many tokens each row holds."""
        return self.model.row_lengths

    def reset(self) -> None:
        """Forget all sequences and steps, see StepRunner."""
        self._steps.clear()
        self.model.reset()

    def _with_tokens(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return a batch with the tokens that the step before has chosen.

        A device is told the row of logits of each; -1: its token is known.
        """
        if not self._is_on_device:
            last, known = self._last_ids, batch.decode_ids
            ids = [known[i] if k < 0 else last[k] for i, k in enumerate(batch.future_tokens)]
            return batch._replace(decode_ids=tuple(ids), future_tokens=())
        if isinstance(self._rows, slice):
            return batch
        rows = self._rows.tolist()
        origins = tuple([rows[k] if k >= 0 else -1 for k in batch.future_tokens])
        return batch._replace(future_tokens=origins)

    def _result(self, step: Step, pending: Pending, num_padding: int, seconds: float) -> StepResult:
        """Choose all that a step draws and score what it scores behind its logits.

        `seconds` is how long it took to compute or to queue it.
        """
        sampler, waiting = self._sampler, perf_counter()
        logits = pending()
        started = perf_counter()
        plain = sampler.choose(logits, step.sampling_batch) if step.plain else PlainChoices()
        choices = sampler.sample(logits, step.draws) if step.draws else ()
        scores = [sampler.score(logits, draw) for draw in step.scores]
        # The next step overwrites the array.
        alignment = None if logits.alignment is None else logits.alignment.copy()
        return StepResult(
            plain,
            tuple(choices),
            tuple(scores),
            alignment,
            num_padding,
            model_seconds=seconds + started - waiting,
            sampling_seconds=perf_counter() - started,
        )


def _whole_rows(step: Step) -> list[int]:
    """Return which rows of logits the draws of a step may read, beside their likeliest tokens."""
    found: set[int] = set()
    for draw in step.draws:
        if reads_rows(draw):
            members = draw.beams if isinstance(draw, BeamExpansion) else (draw,)
            found.update(member.logits_row for member in members)
    return sorted(found)
