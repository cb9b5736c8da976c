"""Runs the engines or the servers of a work in turns, with the same requests."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtest.errors import LoadTestError
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import Engine, Setting, Work
from loadtest.lab.turns import in_turn
from loadtest.work.ask import Answer

_PAUSE = 0.3  # seconds before an engine runs: the threads of the last one spin no longer
_LEAST_REQUESTS = 4  # per run; each of many streams asks twice
_WARM_UP_TOKENS = 8  # in an answer before the first run
_TRIAL = -1  # the round in which settings are tried


@dataclass(frozen=True)
class Loop:
    """So many requests, so many of them at once; the same seed asks the same."""

    concurrency: int
    num_requests: int  # a multiple of that
    num_prompt_tokens: int
    num_new_tokens: int
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class Answered:
    """Times of a loop in seconds, and every answer in the order of asking."""

    seconds: float  # for all requests
    first_token: float  # the median; of an engine the time of prompts with one new token each
    output_token: float | None  # each of those behind it; None: there are none
    answers: tuple[Answer, ...]
    first_token_p99: float | None = None
    late: tuple[str, ...] = ()  # why the figures are the client's


class Peer(Protocol):
    """An engine that is loaded, or a server that runs; LoadTestError says that it failed."""

    versions: Mapping[str, str]

    def ask(self, loop: Loop) -> Answered:
        """Run all requests of a loop."""

    def close(self) -> None:
        """End it."""


StartPeer = Callable[[Engine, LoadOptions], Peer]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    work: Work
    concurrencies: tuple[int, ...]
    num_rounds: int
    num_threads: int
    vocab_size: int
    directory: Path  # has the models
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

    def loop(self, concurrency: int, name: str, num_new_tokens: int) -> Loop:
        """Return a loop that is the same for all, with prompts that no other has."""
        return Loop(
            concurrency=concurrency,
            num_requests=max(_LEAST_REQUESTS, 2 * concurrency),
            num_prompt_tokens=self.work.num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            vocab_size=self.vocab_size,
            seed=random.Random(f"{self.seed} {concurrency} {name}").randrange(2**31),
        )


@dataclass(frozen=True)
class Run:
    """One loop of one engine; times in seconds, see Answered."""

    engine: str
    concurrency: int
    round: int
    setting: Setting
    seconds: float
    tokens_per_second: float
    first_token: float
    output_token: float | None
    first_token_p99: float | None
    late: tuple[str, ...]


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
    missing: dict[str, str]  # engines that did not run, and why
    versions: dict[str, str]


def compare(
    plan: Plan, start: StartPeer, note: Callable[[str], None], pause: float = _PAUSE
) -> Comparison:
    """Choose the setting of each, then measure them in turns, every round in another order.

    Engines stay loaded to the end. Servers are started anew each time, and have the machine alone.
    Ctrl-C ends it early, with as much as was measured.
    """
    with ExitStack() as loaded:
        turns = _Turns(plan, start, note, 0.0 if plan.work.are_servers else pause, loaded)
        try:
            settings = {engine: turns.choose(engine) for engine in plan.work.engines}
            for number in range(plan.num_rounds):
                for engine in in_turn(plan.work.engines, number):
                    turns.take(engine, settings[engine], number)
        except KeyboardInterrupt:
            note("interrupted")
        return Comparison(
            tuple(turns.runs), tuple(turns.agreements()), turns.missing, turns.versions
        )


class _Turns:
    """The runs so far."""

    def __init__(
        self,
        plan: Plan,
        start: StartPeer,
        note: Callable[[str], None],
        pause: float,
        stack: ExitStack,
    ) -> None:
        self._plan, self._start, self._note = plan, start, note
        self._pause, self._stack = pause, stack
        self._loaded: dict[str, Peer] = {}  # engines, by name and setting
        self._answers: dict[tuple[str, int, int], tuple[Answer, ...]] = {}
        self.runs: list[Run] = []
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def choose(self, engine: Engine) -> dict[int, Setting]:
        """Return by concurrency the setting with which an engine is fastest."""
        most = engine.max_concurrency or max(self._plan.concurrencies)
        counts = [count for count in self._plan.concurrencies if count <= most]
        if len(engine.settings) == 1:
            return dict.fromkeys(counts, engine.settings[0])
        tried: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, setting in enumerate(engine.settings):
            for run in self._measure(engine, setting, counts, _TRIAL):
                tried[run.concurrency].append((-run.tokens_per_second, place))
        chosen = {count: engine.settings[min(found)[1]] for count, found in tried.items()}
        if chosen:
            self._note(f"{engine.name} is fastest with {chosen}")
        return chosen

    def take(self, engine: Engine, settings: Mapping[int, Setting], number: int) -> None:
        """Run an engine at every concurrency."""
        for setting in engine.settings:
            counts = [count for count, chosen in settings.items() if chosen == setting]
            for run in self._measure(engine, setting, counts, number):
                self.runs.append(run)

    def agreements(self) -> Iterator[Agreement]:
        """Compare the answers of every engine with those of ours."""
        for engine in self._plan.work.engines:
            for count in self._plan.concurrencies:
                same = [*self._compared(engine, count)]
                if engine.against and same:
                    who = (engine.name, engine.against, count, engine.must_agree)
                    yield Agreement(*who, sum(same), len(same))

    def _compared(self, engine: Engine, concurrency: int) -> Iterator[bool]:
        """Return for each answer whether ours to the same request is the same."""
        for number in range(self._plan.num_rounds):
            theirs = self._answers.get((engine.name, concurrency, number))
            ours = self._answers.get((engine.against or "", concurrency, number))
            if theirs and ours:
                yield from map(_is_same, theirs, ours)

    def _measure(
        self, engine: Engine, setting: Setting, counts: Sequence[int], number: int
    ) -> Iterator[Run]:
        """Yield a run of each concurrency; what fails once is named, and not tried again."""
        name = f"{engine.name} {dict(setting) or ''}".strip()
        if not counts or name in self.missing:
            return
        try:
            with self._started(name, engine, setting) as peer:
                self.versions.update(peer.versions)
                peer.ask(self._plan.loop(max(counts), f"warm-up {number}", _WARM_UP_TOKENS))
                for count in counts:
                    time.sleep(self._pause)
                    yield self._run(peer, engine, setting, count, number)
        except LoadTestError as error:
            self.missing[name] = str(error)
            self._note(f"without {name}: {error}")

    @contextmanager
    def _started(self, name: str, engine: Engine, setting: Setting) -> Iterator[Peer]:
        options = self._plan.options(engine, setting)
        if self._plan.work.are_servers:
            with closing(self._start(engine, options)) as server:
                yield server
            return
        if name not in self._loaded:
            self._loaded[name] = self._stack.enter_context(closing(self._start(engine, options)))
        yield self._loaded[name]

    def _run(self, peer: Peer, engine: Engine, setting: Setting, count: int, number: int) -> Run:
        loop = self._plan.loop(count, str(number), self._plan.work.num_new_tokens)
        answered = peer.ask(loop)
        rate = loop.num_requests * loop.num_new_tokens / answered.seconds
        self._answers[engine.name, count, number] = answered.answers
        self._note(f"round {number}, {count} at once, {engine.name}: {rate:.1f} tokens/s")
        return Run(
            engine=engine.name,
            concurrency=count,
            round=number,
            setting=setting,
            seconds=answered.seconds,
            tokens_per_second=rate,
            first_token=answered.first_token,
            output_token=answered.output_token,
            first_token_p99=answered.first_token_p99,
            late=answered.late,
        )


def _is_same(one: Answer, other: Answer) -> bool:
    """Return whether two answers have the same tokens, or the same text where ids are not told."""
    field = "token_ids" if "token_ids" in one and "token_ids" in other else "text"
    return one[field] == other[field]
