"""Runs the engines of a work in turn: whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtest.lab.peers.process import Sample, WorkerError, WorkerProcess
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.lab.peers.works import Engine, Setting, Work

_PAUSE = 0.3  # seconds before a run: the threads of the last engine spin no longer
_TRIALS = 2  # per setting, to choose the fastest
_LEAST_REQUESTS = 4  # per run: few at once are asked for again, as one alone is soon done


class Worker(Protocol):
    """A loaded engine; a WorkerProcess outside of tests."""

    versions: Mapping[str, str]

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Sample:
        """Run the prompts together."""

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""

    def close(self) -> None:
        """Unload."""


StartWorker = Callable[[Engine, LoadOptions], Worker]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    work: Work
    concurrencies: tuple[int, ...]
    num_rounds: int
    num_threads: int
    vocab_size: int
    directory: Path  # with the models
    seed: int = 0

    def options(self, engine: Engine, setting: Setting) -> LoadOptions:
        """Return what an engine loads."""
        work = self.work
        return LoadOptions(
            directory=str(self.directory),
            weights=engine.weights,
            num_threads=self.num_threads,
            max_concurrency=max(self.concurrencies),
            max_tokens=work.num_prompt_tokens + work.num_new_tokens,
            num_beams=work.num_beams,
            setting=setting,
        )


@dataclass(frozen=True)
class Run:
    """One measurement of one engine: the whole work, and its prompts with one token each."""

    engine: str
    concurrency: int
    round: int
    setting: Setting
    seconds: float  # a batch of requests, the mean if several are run
    prompt_seconds: float  # the same with one new token each
    others_cpu_seconds: float  # used meanwhile by the workers that have nothing to do


@dataclass(frozen=True)
class Agreement:
    """How many of an engine's outputs were those of ours."""

    engine: str
    against: str
    concurrency: int
    must_agree: bool
    equal: int
    compared: int


@dataclass(frozen=True)
class Comparison:
    """A comparison with all that was measured."""

    runs: tuple[Run, ...]
    agreements: tuple[Agreement, ...]
    missing: dict[str, str]  # engines that could not be loaded, and why
    versions: dict[str, str]


def compare(
    plan: Plan, start: StartWorker, note: Callable[[str], None], pause: float = _PAUSE
) -> Comparison:
    """Load every engine, then measure them in turn, every round in another order."""
    with contextlib.ExitStack() as stack:
        fleet = _Fleet(plan, start, note)
        stack.callback(fleet.close)
        fleet.load()
        runs: list[Run] = []
        agreements: list[Agreement] = []
        for concurrency in plan.concurrencies:
            measured = _Concurrency(plan, fleet, concurrency, note, pause)
            runs += measured.measure()
            agreements += measured.agreements()
        return Comparison(tuple(runs), tuple(agreements), fleet.missing, fleet.versions)


def start_process(log: Path) -> StartWorker:
    """Return what starts workers as processes that write to a log."""
    return lambda engine, options: WorkerProcess(engine.adapter, options, log)


def prompts_of(plan: Plan, concurrency: int, name: str) -> list[list[int]]:
    """Return random prompts, the same for every engine that asks by the same name."""
    draw = random.Random(f"{plan.seed} {concurrency} {name}")
    return [
        [draw.randrange(plan.vocab_size) for _ in range(plan.work.num_prompt_tokens)]
        for _ in range(concurrency)
    ]


class _Fleet:
    """A worker for every engine and setting."""

    def __init__(self, plan: Plan, start: StartWorker, note: Callable[[str], None]) -> None:
        self._plan, self._start, self._note = plan, start, note
        self.workers: dict[Engine, list[tuple[Setting, Worker]]] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def load(self) -> None:
        """Start all workers that can be started."""
        for engine in self._plan.work.engines:
            for setting in engine.settings:
                self._load(engine, setting)

    def all(self) -> list[Worker]:
        """Return every worker."""
        return [worker for workers in self.workers.values() for _, worker in workers]

    def close(self) -> None:
        """End all workers."""
        for worker in self.all():
            worker.close()

    def _load(self, engine: Engine, setting: Setting) -> None:
        try:
            worker = self._start(engine, self._plan.options(engine, setting))
        except WorkerError as error:
            self.missing[engine.name] = str(error)
            self._note(f"without {engine.name}: {error}")
            return
        self.versions.update(worker.versions)
        self.workers.setdefault(engine, []).append((setting, worker))
        self._note(f"loaded {engine.name} {dict(setting) or ''}")


class _Concurrency:
    """All rounds of one concurrency."""

    def __init__(
        self,
        plan: Plan,
        fleet: _Fleet,
        concurrency: int,
        note: Callable[[str], None],
        pause: float,
    ) -> None:
        self._plan, self._fleet, self._concurrency = plan, fleet, concurrency
        self._note, self._pause = note, pause
        self._outputs: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {}  # engine, round

    def measure(self) -> list[Run]:
        """Choose every engine's setting, then run the rounds."""
        engines = [
            (engine, *chosen)
            for engine, workers in self._fleet.workers.items()
            if engine.max_concurrency is None or self._concurrency <= engine.max_concurrency
            if (chosen := self._fastest(engine, workers)) is not None
        ]
        runs = []
        for number in range(self._plan.num_rounds if engines else 0):
            first = number % len(engines)
            for engine, setting, worker in engines[first:] + engines[:first]:
                runs.append(self._run(engine, setting, worker, number))
        return runs

    def agreements(self) -> list[Agreement]:
        """Compare the outputs of every engine with those of the one of ours."""
        found = []
        for engine in self._fleet.workers:
            rounds = [n for n in range(self._plan.num_rounds) if (engine.name, n) in self._outputs]
            pairs = [
                pair
                for n in rounds
                if engine.against and (engine.against, n) in self._outputs
                for pair in zip(
                    self._outputs[engine.name, n], self._outputs[engine.against, n], strict=True
                )
            ]
            if engine.against and pairs:
                equal = sum(one == other for one, other in pairs)
                found.append(
                    Agreement(
                        engine.name,
                        engine.against,
                        self._concurrency,
                        engine.must_agree,
                        equal,
                        len(pairs),
                    )
                )
        return found

    def _fastest(
        self, engine: Engine, workers: Sequence[tuple[Setting, Worker]]
    ) -> tuple[Setting, Worker] | None:
        """Warm up, and try every setting if there are several; None: the engine fails with all."""
        times: list[tuple[float, int]] = []
        for index, (setting, worker) in enumerate(workers):
            try:
                times.append((self._try(worker, _TRIALS if len(workers) > 1 else 0), index))
            except WorkerError as error:
                self._note(f"{engine.name} fails with {dict(setting)}: {error}")
                self._fleet.missing[f"{engine.name} {dict(setting) or ''}".strip()] = str(error)
        if not times:
            return None
        setting, worker = workers[min(times)[1]]
        if len(workers) > 1:
            self._note(f"{engine.name} at {self._concurrency}: fastest with {dict(setting)}")
        return setting, worker

    def _try(self, worker: Worker, num_trials: int) -> float:
        worker.generate(self._prompts("warm-up"), 2)
        prompts, num_new = self._prompts("trial"), self._plan.work.num_new_tokens
        trials = [self._generate(worker, prompts, num_new).seconds for _ in range(num_trials)]
        return min(trials, default=0.0)

    def _run(self, engine: Engine, setting: Setting, worker: Worker, number: int) -> Run:
        others = [other for other in self._fleet.all() if other is not worker]
        # Never the same prompt twice: what is kept of one must not help another.
        time.sleep(self._pause)
        alone, _ = self._timed(worker, f"prefill {number}", 1)
        before = sum(other.cpu_seconds() for other in others)
        seconds, tokens = self._timed(worker, f"{number}", self._plan.work.num_new_tokens)
        self._outputs[engine.name, number] = tokens
        run = Run(
            engine=engine.name,
            concurrency=self._concurrency,
            round=number,
            setting=setting,
            seconds=seconds,
            prompt_seconds=alone,
            others_cpu_seconds=sum(other.cpu_seconds() for other in others) - before,
        )
        rate = self._concurrency * self._plan.work.num_new_tokens / seconds
        self._note(
            f"round {number}, {self._concurrency} at once, {engine.name}: {rate:.1f} tokens/s"
        )
        return run

    def _timed(
        self, worker: Worker, name: str, num_new_tokens: int
    ) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Return the mean seconds of a batch of prompts, and the outputs of all batches."""
        samples = [
            worker.generate(self._prompts(f"{name}, {k}"), num_new_tokens)
            for k in range(max(1, _LEAST_REQUESTS // self._concurrency))
        ]
        mean = sum(sample.seconds for sample in samples) / len(samples)
        return mean, tuple(output for sample in samples for output in sample.tokens)

    def _prompts(self, name: str) -> list[list[int]]:
        return prompts_of(self._plan, self._concurrency, name)

    def _generate(self, worker: Worker, prompts: Prompts, num_new_tokens: int) -> Sample:
        time.sleep(self._pause)
        return worker.generate(prompts, num_new_tokens)
