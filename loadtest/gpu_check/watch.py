"""How busy the GPU is while workers of a comparison have whole requests to do."""

from __future__ import annotations

import statistics

from loadtest.gpu_check.gpu_use import GpuUse
from loadtest.lab.peers.comparison import StartWorker, Worker
from loadtest.lab.peers.process import Sample
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.lab.peers.works import Engine


class Watch:
    """Starts workers and looks at the GPU while they have whole requests to do."""

    def __init__(self, start: StartWorker) -> None:
        self._start = start
        self.seen: dict[tuple[str, int], list[float]] = {}  # by engine and number of requests

    def start(self, engine: Engine, options: LoadOptions) -> Worker:
        """Start a worker that is watched."""
        return _Watched(self._start(engine, options), engine.name, self.seen)

    def busy(self, engine: str, concurrency: int) -> float | None:
        """Return the median share of time in which the GPU computed; None: it is not known."""
        seen = self.seen.get((engine, concurrency))
        return statistics.median(seen) if seen else None


class _Watched:
    def __init__(self, worker: Worker, name: str, seen: dict[tuple[str, int], list[float]]) -> None:
        self._worker, self._name, self._seen = worker, name, seen
        self.versions = worker.versions

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Sample:
        with GpuUse() as use:
            sample = self._worker.generate(prompts, num_new_tokens)
        if use.busy is not None and num_new_tokens > 2:  # else prompts, or warming up
            self._seen.setdefault((self._name, len(prompts)), []).append(use.busy)
        return sample

    def cpu_seconds(self) -> float:
        return self._worker.cpu_seconds()

    def close(self) -> None:
        self._worker.close()
