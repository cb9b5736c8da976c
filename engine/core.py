"""The engine's inner loop: one step at a time, in one thread."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import TokenweirError
from engine.model_runner import ModelRunner
from engine.output import EngineOutput
from engine.sampler import Sampler
from engine.scheduler import Scheduler


class EngineCore:
    """Runs what the scheduler decides."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler

    def step(self) -> list[EngineOutput]:
        """Compute one token of every decoding sequence, and some of the prompts."""
        batch = self.scheduler.schedule()
        logits = self._runner.run(batch)
        tokens = self._sampler.sample(logits, batch.draws)
        return self.scheduler.update(tokens)

    def recover(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """After a step that failed: fail every request and start with an empty cache."""
        self._runner.reset()
        return self.scheduler.fail_all(describe)
