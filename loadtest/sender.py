"""Sends the requests of a load test when they are due, and notes what happens to each."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from loadtest.answers import KeptAnswer, WrongAnswer, difference
from loadtest.arrival.arrival import ClosedLoop, Replay
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.metrics import OwnLoad, RequestRecord, distribution
from loadtest.target.target import CallFailed, Reply, Target, Told
from loadtest.work.ask import Ask, Work

_WATCH_PERIOD = 0.05  # seconds between looks at the event loop's own delay
_FREEZE_PERIOD = 1.0  # seconds between the times at which records are taken from the collector
_UNUSED = 2**40  # an index that no test comes to
_WARMED_UP = 64  # requests among which one of each kind is sent before the test
_TOLD = tuple(one.name for one in fields(Told))


@dataclass(frozen=True)
class Shard:
    """The part of a test that one process sends: every `of`-th request."""

    number: int = 0
    of: int = 1


class Sender:
    """Sends the requests; times count from the start that `send_all` is given."""

    def __init__(
        self, target: Target, config: LoadConfig, work: Work, shard: Shard | None = None
    ) -> None:
        self._target = target
        self._config = config
        self._work = work
        self._shard = shard or Shard()
        self._start = 0.0
        self._loop_delays: list[float] = []
        self._processor_seconds = self._seconds = 0.0  # spent in `send_all`
        self.records: list[RequestRecord] = []  # ended requests, in the order of ends
        self.kept: list[KeptAnswer] = []
        self.expected: list[WrongAnswer | None] = []  # a comparison each with a known answer
        self.num_in_flight = 0

    @property
    def own_load(self) -> OwnLoad:
        """How busy this event loop has been in `send_all`."""
        share = self._processor_seconds / max(self._seconds, 1e-9)
        return OwnLoad(share, distribution(self._loop_delays))

    async def warm_up(self) -> None:
        """Send a request of each kind that is not measured: it opens connections.

        If requests never repeat, it is none of the test: a server may keep what it computes.
        Raises LoadTestError for one that cannot be made, or whose answer cannot be compared.
        """
        kinds: dict[tuple[object, ...], Ask] = {}
        first = _UNUSED if self._work.num_different is None else 0
        for index in range(min(_WARMED_UP, self._config.num_requests or _WARMED_UP)):
            ask = self._work.ask(first + index)
            fields = tuple(ask.options), tuple(ask.expected or ()), bool(ask.turns)
            kinds.setdefault((ask.kind, ask.method, type(ask.prompt), *fields), ask)
        for ask in kinds.values():
            try:
                reply = await self._target.send(ask, keep=bool(ask.expected or ask.turns))
                _check_told(ask, reply)
            except CallFailed:
                pass  # the test itself will show it
            except (TypeError, ValueError) as error:
                raise LoadTestError(f"a request cannot be made: {error}") from error

    async def send_all(self, start: float) -> None:
        """Send the requests from `start` on, a time of the event loop; note what comes back."""
        self._start = start
        processor_start = time.thread_time()
        beside = [asyncio.create_task(self._watch_delay()), asyncio.create_task(_keep_records())]
        try:
            if isinstance(self._config.arrival, ClosedLoop):
                await self._closed_loop(self._config.arrival.concurrency)
            else:
                await self._open_loop()
        finally:
            for task in beside:
                task.cancel()
            self._processor_seconds = time.thread_time() - processor_start
            self._seconds = self._now()

    async def _watch_delay(self) -> None:
        while True:
            due = self._now() + _WATCH_PERIOD
            await asyncio.sleep(_WATCH_PERIOD)
            self._loop_delays.append(self._now() - due)

    async def _open_loop(self) -> None:
        times = arrival_times(self._config, self._work)
        async with asyncio.TaskGroup() as group:
            for index in range(self._shard.number, len(times), self._shard.of):
                await asyncio.sleep(times[index] - self._now())
                group.create_task(self._session(index, times[index]))

    async def _closed_loop(self, concurrency: int) -> None:
        indices = self._indices()

        async def user() -> None:
            for index in indices:
                await self._session(index, self._now())

        number, of = self._shard.number, self._shard.of
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency // of + (number < concurrency % of)):
                group.create_task(user())

    def _indices(self) -> Iterator[int]:
        """Yield the indices of a closed loop, until their number or their time is over."""
        most, duration = self._config.num_requests, self._config.duration
        for index in itertools.count(self._shard.number, self._shard.of):
            if most is not None and index >= most:
                return
            if duration is not None and self._now() >= duration:
                return
            yield index

    async def _session(self, index: int, scheduled: float) -> None:
        """Send a request, then what follows it: each turn is due when the last one is answered."""
        ask: Ask | None = self._work.ask(index)
        turn = 0
        while ask is not None:
            reply = await self._measure(index, turn, ask, scheduled)
            if reply is None or not ask.turns:
                return
            ask = self._work.next_turn(ask, str((reply.answer or {}).get("text", "")))
            turn, scheduled = turn + 1, self._now()

    async def _measure(self, index: int, turn: int, ask: Ask, scheduled: float) -> Reply | None:
        """Send one request, note its record; return its reply, None if it failed."""
        is_sample = self._is_sample(index)
        keep = is_sample or self._config.keep_answers or bool(ask.turns) or bool(ask.expected)
        prompt = index % (self._work.num_different or index + 1)
        record = RequestRecord(
            index,
            prompt,
            scheduled,
            sent=self._now(),
            finished=scheduled,
            status="OK",
            kind=ask.kind,
            turn=turn,
        )
        self.num_in_flight += 1
        try:
            reply = await self._target.send(ask, keep=keep)
        except CallFailed as error:
            self.records.append(self._failed(record, error))
            return None
        except (TypeError, ValueError, LoadTestError) as error:
            failure = CallFailed("NOT_SENT", "", f"the request cannot be made: {error}")
            self.records.append(self._failed(record, failure))
            return None
        finally:
            self.num_in_flight -= 1
        self.records.append(self._answered(record, ask, reply))
        if reply.answer is not None and (is_sample or self._config.keep_answers):
            kept = KeptAnswer(index, turn, ask, reply.answer, reply.seed, is_sample)
            self.kept.append(kept)
        return reply

    def _failed(self, record: RequestRecord, error: CallFailed) -> RequestRecord:
        return replace(
            record,
            finished=self._now(),
            status=error.status,
            reason=error.reason,
            message=error.message,
        )

    def _answered(self, record: RequestRecord, ask: Ask, reply: Reply) -> RequestRecord:
        check: Literal["", "right", "wrong"] = ""
        if ask.expected is not None:
            wrong = difference(record.index, ask.expected, reply.answer or {})
            self.expected.append(wrong)
            check = "right" if wrong is None else "wrong"
        return replace(
            record,
            finished=self._now(),
            token_times=tuple(at - self._start for at in reply.message_times),
            check=check,
            **{name: getattr(reply, name) for name in _TOLD},
        )

    def _is_sample(self, index: int) -> bool:
        """Return whether the answers to a request are asked again; the same for the same seed."""
        if not self._config.verify:
            return False
        drawn = np.random.default_rng((self._config.seed, index, 1)).random()
        return bool(drawn < self._config.verify)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start


def _check_told(ask: Ask, reply: Reply) -> None:
    """Raise LoadTestError where an answer lacks what it is compared by, or the next turn asks."""
    answer = reply.answer or {}
    if missing := [name for name in ask.expected or () if name not in answer]:
        raise LoadTestError(
            f"the expected answers have {', '.join(missing)}, those of the server only "
            f"{', '.join(answer)}; keep answers with --answers from the same protocol and "
            "options, or leave only what both have"
        )
    if any("{answer}" in turn for turn in ask.turns) and "text" not in answer:
        raise LoadTestError(
            f"a session goes on with the text of its answers, and these have only "
            f"{', '.join(answer)}; ask by a method that generates, or leave the turns out"
        )


def arrival_times(config: LoadConfig, work: Work) -> list[float]:
    """Return when each request of an open loop or a trace is due, in seconds from the start."""
    arrival = config.arrival
    if isinstance(arrival, ClosedLoop):
        raise LoadTestError("a closed loop has no arrival times")
    if isinstance(arrival, Replay):
        times = arrival.times(work.times, config.duration)[: config.num_requests]
    else:
        times = arrival.times(config.num_requests, config.duration, config.seed)
    return [float(time) for time in times]


async def _keep_records() -> None:
    """Freeze for the garbage collector what is there, again and again.

    Records stay to the end. To look at half a million of them stops the test for half a second.
    """
    while True:
        gc.freeze()
        await asyncio.sleep(_FREEZE_PERIOD)
