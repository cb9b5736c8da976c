"""Runs servers in turn with the same load: one at a time has the machine, and is started anew."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtest.lab.peers.comparison import Agreement, Plan
from loadtest.lab.peers.process import WorkerError
from loadtest.lab.peers.server_process import Answered, Loop, ServerProcess
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import Engine, Setting
from loadtest.metrics import Distribution
from loadtest.work.ask import Answer

_LEAST_REQUESTS = 4  # per run; each of many streams asks twice
_WARM_UP_TOKENS = 8  # in an answer before the first run
_TRIAL = -1  # the round in which settings are tried


class Server(Protocol):
    """A running server; a ServerProcess outside of tests."""

    versions: Mapping[str, str]

    def ask(self, loop: Loop) -> Answered:
        """Send a closed loop."""
        ...


StartServer = Callable[[Engine, LoadOptions], AbstractContextManager[Server]]


@dataclass(frozen=True)
class ServerRun:
    """One closed loop at one server."""

    engine: str
    concurrency: int
    round: int
    setting: Setting
    num_requests: int
    seconds: float
    tokens_per_second: float  # new ones
    time_to_first_token: Distribution | None
    time_per_output_token: Distribution | None
    end_to_end: Distribution | None
    client_share: float  # the load test's share of a core
    invalid: tuple[str, ...]  # why the figures are the client's


@dataclass(frozen=True)
class ServerComparison:
    """A comparison of servers with all that was measured."""

    runs: tuple[ServerRun, ...]
    agreements: tuple[Agreement, ...]
    missing: dict[str, str]  # servers that did not run, and why
    versions: dict[str, str]


def compare_servers(
    plan: Plan, start: StartServer, note: Callable[[str], None]
) -> ServerComparison:
    """Choose every server's setting, then measure them in turn, every round in another order.

    Ctrl-C ends it early, with as much as was measured.
    """
    turns = _Turns(plan, start, note)
    try:
        settings = {engine: turns.choose(engine) for engine in plan.work.engines}
        for number in range(plan.num_rounds):
            first = number % len(plan.work.engines)
            for engine in plan.work.engines[first:] + plan.work.engines[:first]:
                turns.take(engine, settings[engine], number)
    except KeyboardInterrupt:
        note("interrupted")
    runs = tuple(turns.runs)
    return ServerComparison(runs, tuple(turns.agreements()), turns.missing, turns.versions)


def start_server(log: Path) -> StartServer:
    """Return what starts servers as processes that write to a log."""
    return lambda engine, options: ServerProcess(engine.adapter, options, log)


class _Turns:
    """The runs of the servers so far."""

    def __init__(self, plan: Plan, start: StartServer, note: Callable[[str], None]) -> None:
        self._plan, self._start, self._note = plan, start, note
        self._answers: dict[tuple[str, int, int], tuple[Answer, ...]] = {}
        self.runs: list[ServerRun] = []
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def choose(self, engine: Engine) -> dict[int, Setting]:
        """Return by concurrency the setting with which a server is fastest."""
        if len(engine.settings) == 1:
            return dict.fromkeys(self._plan.concurrencies, engine.settings[0])
        tried: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, setting in enumerate(engine.settings):
            runs: list[ServerRun] = []
            self._measure(engine, setting, self._plan.concurrencies, _TRIAL, runs)
            for run in runs:
                tried[run.concurrency].append((-run.tokens_per_second, place))
        chosen = {count: engine.settings[min(found)[1]] for count, found in tried.items()}
        self._note(f"{engine.name} is fastest with {chosen}")
        return chosen

    def take(self, engine: Engine, settings: Mapping[int, Setting], number: int) -> None:
        """Run a server at every concurrency."""
        for setting in engine.settings:
            counts = [count for count, chosen in settings.items() if chosen == setting]
            if counts:
                self._measure(engine, setting, counts, number, self.runs)

    def agreements(self) -> list[Agreement]:
        """Compare the answers of every server with those of ours."""
        found = []
        for engine in self._plan.work.engines:
            for count in self._plan.concurrencies:
                pairs = [*self._pairs(engine, count)]
                if engine.against and pairs:
                    equal = sum(_is_same(*pair) for pair in pairs)
                    who = (engine.name, engine.against, count, engine.must_agree)
                    found.append(Agreement(*who, equal, len(pairs)))
        return found

    def _pairs(self, engine: Engine, concurrency: int) -> Iterator[tuple[Answer, Answer]]:
        """Yield the answers of a server, each with that of ours to the same request."""
        for number in range(self._plan.num_rounds):
            theirs = self._answers.get((engine.name, concurrency, number))
            ours = self._answers.get((engine.against or "", concurrency, number))
            if theirs and ours:
                yield from zip(theirs, ours, strict=True)

    def _measure(
        self,
        engine: Engine,
        setting: Setting,
        counts: Sequence[int],
        number: int,
        runs: list[ServerRun],
    ) -> None:
        """Start a server with a setting, send it a loop of each concurrency, note the runs."""
        try:
            with self._start(engine, self._plan.options(engine, setting)) as server:
                self.versions.update(server.versions)
                server.ask(self._loop(max(counts), "warm-up", _WARM_UP_TOKENS))
                for count in counts:
                    runs.append(self._run(server, engine, setting, count, number))
        except WorkerError as error:
            self.missing[f"{engine.name} {dict(setting) or ''}".strip()] = str(error)
            self._note(f"without {engine.name} {dict(setting) or ''}: {error}")

    def _run(
        self, server: Server, engine: Engine, setting: Setting, count: int, number: int
    ) -> ServerRun:
        loop = self._loop(count, str(number), self._plan.work.num_new_tokens)
        answered = server.ask(loop)
        rate = loop.num_requests * loop.num_new_tokens / answered.seconds
        self._answers[engine.name, count, number] = answered.answers
        self._note(f"round {number}, {count} at once, {engine.name}: {rate:.1f} tokens/s")
        return ServerRun(
            engine=engine.name,
            concurrency=count,
            round=number,
            setting=setting,
            num_requests=loop.num_requests,
            seconds=answered.seconds,
            tokens_per_second=rate,
            time_to_first_token=answered.time_to_first_token,
            time_per_output_token=answered.time_per_output_token,
            end_to_end=answered.end_to_end,
            client_share=answered.client_share,
            invalid=answered.invalid,
        )

    def _loop(self, concurrency: int, name: str, num_new_tokens: int) -> Loop:
        """Return a loop that is the same for all servers, with prompts that no other has."""
        work = self._plan.work
        return Loop(
            concurrency=concurrency,
            num_requests=max(_LEAST_REQUESTS, 2 * concurrency),
            num_prompt_tokens=work.num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            vocab_size=self._plan.vocab_size,
            seed=random.Random(f"{self._plan.seed} {concurrency} {name}").randrange(2**31),
        )


def _is_same(one: Answer, other: Answer) -> bool:
    """Say whether two answers have the same tokens, or the same text where ids are not told."""
    field = "token_ids" if "token_ids" in one and "token_ids" in other else "text"
    return one[field] == other[field]
