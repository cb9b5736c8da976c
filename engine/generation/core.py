"""The engine's inner loop: step behind step, in one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from engine.errors import EngineFailure, TokenweirError
from engine.scheduling.output import EngineOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step, StepResult
from engine.step_measures import StepMeasures


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the steps so far, in seconds."""

    steps: int = 0
    scheduling: float = 0.0  # deciding what runs, and taking in the tokens
    model: float = 0.0
    sampling: float = 0.0

    @property
    def total(self) -> float:
        """Seconds inside the steps."""
        return self.scheduling + self.model + self.sampling

    def with_step(self, seconds: float, result: StepResult) -> StepTimes:
        """Return these and those of one more step."""
        return StepTimes(
            self.steps + 1,
            self.scheduling + seconds - result.model_seconds - result.sampling_seconds,
            self.model + result.model_seconds,
            self.sampling + result.sampling_seconds,
        )

    def since(self, earlier: StepTimes) -> StepTimes:
        """Return what was added since `earlier`."""
        return StepTimes(
            self.steps - earlier.steps,
            self.scheduling - earlier.scheduling,
            self.model - earlier.model,
            self.sampling - earlier.sampling,
        )


class StepRunner(Protocol):
    """Computes steps on the memory of one kind of KVCache, and chooses behind their logits."""

    overlaps: bool
    """Whether a step may be submitted whose tokens the one under way chooses: see Parts."""

    @property
    def has_result(self) -> bool:
        """Whether the earliest step is done that was not collected.

        It is taken in before the next one begins: nothing is won by letting it wait.
        """

    def submit(self, step: Step) -> None:
        """Begin a step, behind those that are under way; it may be done when this returns."""

    def collect(self) -> StepResult:
        """Return what the earliest step has brought that was not collected, waiting for it."""

    def snapshot(self) -> object:
        """Return what memory holds when no step is under way; equal to that of the KVCache."""

    def reset(self) -> None:
        """Forget all sequences and all steps, after one that failed in the middle."""


class EngineCore:
    """Runs what the scheduler decides."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.under_way: deque[Step] = deque()  # the oldest first
        self.times = StepTimes()  # replaced as a whole by every step, so any thread may read it
        self.measures = StepMeasures()

    @property
    def runs_ahead(self) -> bool:
        """Whether a step begins before the one before it is taken in."""
        return self.runner.overlaps

    @property
    def has_requests(self) -> bool:
        """Whether a step would do anything for somebody, or one is under way."""
        return self.scheduler.has_requests or bool(self.under_way)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or one is under way."""
        return self.scheduler.has_work or bool(self.under_way)

    def step(self) -> list[EngineOutput]:
        """Compute one token of every decoding sequence, and some of the prompts.

        If steps overlap, the next one begins before this one is taken in, so that it need not wait
        for that. A sequence that ends is then in one step more, for nothing.
        """
        started = perf_counter()
        if not self.under_way:
            self._begin(self.scheduler.schedule())
        may_follow = self.runs_ahead and not self.runner.has_result
        if may_follow and self.under_way[-1].may_be_followed:
            if ahead := self.scheduler.schedule_ahead():
                self._begin(ahead)
        step = self.under_way.popleft()
        result = self.runner.collect()
        outputs = self.scheduler.update(step, result)
        ended = perf_counter()
        self.times = self.times.with_step(ended - started, result)
        self._measure(step, started, ended)
        return outputs

    def _begin(self, step: Step) -> None:
        self.under_way.append(step)
        self.runner.submit(step)

    def _measure(self, step: Step, started: float, ended: float) -> None:
        parts = step.parts
        decoding = parts.decoding
        num_continued = len(step.plain)  # all of these go on, unless some begin
        if num_continued < len(decoding) or step.begins:
            num_continued = sum([sequence.num_generated != 1 for sequence in decoding])
        self.measures.took_step(
            started,
            ended,
            batch_size=len(parts.encoding) + len(parts.chunks) + len(decoding),
            # The first token of a sequence behind an encoder is decoded, too.
            num_continued=num_continued,
        )

    def check_integrity(self) -> None:
        """Raise EngineFailure if requests, room and memory do not fit together.

        Call it between two steps, in the thread that runs them.
        """
        problems, wanted = self.scheduler.problems(), self.scheduler.snapshot()
        if wanted is not None and wanted != (found := self.runner.snapshot()):
            problems.append(f"memory holds {found}, and should hold {wanted}")
        if problems:
            raise EngineFailure("the engine is not in order: " + "; ".join(problems))

    def recover(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """Fail every request and start with an empty cache, after a step that failed."""
        self.runner.reset()
        self.under_way.clear()
        return self.scheduler.fail_all(describe)
