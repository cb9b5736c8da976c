"""The engine's inner loop: one step at a time, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from engine.errors import TokenweirError
from engine.sampling.sampler import Sampler
from engine.scheduling.output import EngineOutput
from engine.scheduling.scheduler import Scheduler
from engine.slots.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of the steps so far went, in seconds."""

    steps: int = 0
    scheduling: float = 0.0  # deciding what runs, and taking in the tokens
    model: float = 0.0
    sampling: float = 0.0

    @property
    def total(self) -> float:
        """Seconds inside the steps."""
        return self.scheduling + self.model + self.sampling

    def since(self, earlier: StepTimes) -> StepTimes:
        """Return what was added since `earlier`."""
        return StepTimes(
            self.steps - earlier.steps,
            self.scheduling - earlier.scheduling,
            self.model - earlier.model,
            self.sampling - earlier.sampling,
        )


class EngineCore:
    """Runs what the scheduler decides."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._num_padding = 0  # rows that the runner had computed for nobody, in all
        self.times = StepTimes()  # replaced as a whole by every step, so any thread may read it

    def step(self) -> list[EngineOutput]:
        """Compute one token of every decoding sequence, and some of the prompts."""
        started = perf_counter()
        batch = self.scheduler.schedule()
        scheduled = perf_counter()
        logits = self._runner.run(batch)
        computed = perf_counter()
        tokens = self._sampler.sample(logits, batch.draws)
        scores = [self._sampler.score(logits, draw) for draw in batch.scores]
        sampled = perf_counter()
        self.scheduler.count_padding(self._runner.num_padding - self._num_padding)
        self._num_padding = self._runner.num_padding
        outputs = self.scheduler.update(tokens, scores, logits.alignment)
        self.times = StepTimes(
            self.times.steps + 1,
            self.times.scheduling + scheduled - started + perf_counter() - sampled,
            self.times.model + computed - scheduled,
            self.times.sampling + sampled - computed,
        )
        return outputs

    def recover(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """After a step that failed: fail every request and start with an empty cache."""
        self._runner.reset()
        return self.scheduler.fail_all(describe)
