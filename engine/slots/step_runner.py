"""Runs whole steps on slots: what the model gives, and what is chosen behind it."""

from __future__ import annotations

from collections import deque
from time import perf_counter

from engine.sampling.logits import Floats, StepLogits
from engine.sampling.plain import PlainChoices
from engine.sampling.sampler import Sampler
from engine.scheduling.step import Step
from engine.scheduling.step_result import StepResult
from engine.slots.batch import RowLengths, ScheduledBatch
from engine.slots.runner import ModelRunner


class SlotStepRunner:
    """A StepRunner for the places of a SlotKVCache; a step is computed when it is submitted."""

    has_result = False  # a model that feeds ids has none before it is waited for

    def __init__(self, model: ModelRunner, sampler: Sampler, *, feeds_ids: bool = False) -> None:
        """`feeds_ids` is for models that compute behind the caller's back: else nothing is won."""
        self.model = model
        self.feeds_ids = feeds_ids
        self._sampler = sampler
        self._last_ids: list[int] = []  # that the step before has drawn plainly
        self._results: deque[StepResult] = deque()

    def submit(self, step: Step) -> None:
        """Run a step, see StepRunner."""
        batch, before = step.places, self.model.num_padding
        assert isinstance(batch, ScheduledBatch)
        started = perf_counter()
        if batch.fed:
            batch = batch._replace(decode_ids=self._fed_ids(batch))
        logits = self.model.run(batch)
        seconds, num_padding = perf_counter() - started, self.model.num_padding - before
        result = chosen(self._sampler, step, logits, seconds, num_padding)
        self._last_ids = result.plain.token_ids
        self._results.append(result)

    def collect(self) -> StepResult:
        """Return what the earliest step has brought, see StepRunner."""
        return self._results.popleft()

    def contents(self) -> RowLengths:
        """Return how many tokens each row holds."""
        return self.model.row_lengths

    def reset(self) -> None:
        """Forget all sequences and steps, see StepRunner."""
        self._results.clear()
        self.model.reset()

    def _fed_ids(self, batch: ScheduledBatch) -> tuple[int, ...]:
        last_ids, known = self._last_ids, batch.decode_ids
        return tuple([known[i] if k < 0 else last_ids[k] for i, k in enumerate(batch.fed)])


def chosen(
    sampler: Sampler, step: Step, logits: StepLogits, model_seconds: float, num_padding: int
) -> StepResult:
    """Choose all that a step draws and score what it scores behind its logits."""
    started = perf_counter()
    plain = sampler.choose(logits, step.plain_draws) if step.plain else PlainChoices()
    choices = sampler.sample(logits, step.draws) if step.draws else ()
    scores = [sampler.score(logits, draw) for draw in step.scores]
    return StepResult(
        plain,
        tuple(choices),
        tuple(scores),
        _alignment(logits),
        num_padding,
        model_seconds=model_seconds,
        sampling_seconds=perf_counter() - started,
    )


def _alignment(logits: StepLogits) -> Floats | None:
    """Return the attention as an array that the next step does not overwrite."""
    return None if logits.alignment is None else logits.alignment.copy()
