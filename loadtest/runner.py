"""Runs a load test: finds the model at the server, sends the requests, gathers what came out."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from loadtest.answers import Checks, KeptAnswer, WrongAnswer, checks_of, difference
from loadtest.clients import Clients
from loadtest.config import LoadConfig
from loadtest.goals import goodput, is_lost, outcomes
from loadtest.interruption import signals_noted
from loadtest.load_report import LoadReport
from loadtest.metrics import (
    MAX_DELAY,
    Distribution,
    OwnLoad,
    RequestRecord,
    Window,
    due_in,
    summarize,
    window_of,
)
from loadtest.sender import Sender, arrival_times
from loadtest.target.open_target import ClientArguments, open_target
from loadtest.target.target import CallFailed, Found, ServerSample, Target
from loadtest.work.ask import Ask, Work

_SAMPLE_PERIOD = 0.5  # seconds between questions how busy the server is
_WATCH_PERIOD = 0.5  # seconds between looks of whoever watches


class Course(Protocol):
    """How far a load test has come."""

    @property
    def records(self) -> Sequence[RequestRecord]:
        """Records of ended requests, in the order of ends."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not answered."""
        ...


Watch = Callable[[Course], None]  # called twice a second and at the end
RunLoop = Callable[[Coroutine[Any, Any, bool]], bool]  # as asyncio.run, or that of a Runner


class LoadTest:
    """A load test: it is run to its end, or until Ctrl-C."""

    def __init__(
        self,
        config: LoadConfig,
        work: Work,
        watch: Watch = lambda course: None,
        client_arguments: ClientArguments = dict,
    ) -> None:
        self._config = config
        asked = config.address, config.model, config.timeout, client_arguments
        self._connect = partial(open_target, *asked, config.admin_address)
        self._work = work
        self._watch = watch
        self._started_at = datetime.now(UTC)
        self._start = 0.0  # on the clock of the event loop; 0: not yet
        self._end: float | None = None  # an interrupted test's, seconds from its start
        self._found = Found("generate")
        self._clients: Sender | Clients | None = None
        self._samples: list[ServerSample] = []
        self._verified: list[WrongAnswer | None] = []
        self._num_unverified = 0
        self._is_stopped = False  # since the bounds could not be kept any more

    def run(self, run_loop: RunLoop = asyncio.run, early: Sequence[int] = ()) -> LoadReport:
        """Run the test; what is interrupted, at whatever moment, gives a report too.

        Raise LoadTestError if no server answers, or if it does not serve the model; a request that
        fails is a record like any other. Tests that may be ended with calls under way, and others
        behind them, are to share an event loop: gRPC tells of such calls later. The first of the
        signals in `early`, which came before, ends the test at its beginning.
        """
        is_interrupted = True
        with suppress(KeyboardInterrupt):
            for number in early[:1]:
                signal.raise_signal(number)
            is_interrupted = not run_loop(self._is_run())
        with signals_noted() as noted:
            report = self._report(is_interrupted)
        return replace(report, interrupted=report.interrupted or bool(noted))

    async def _is_run(self) -> bool:
        """Run the test; return whether it came to its end."""
        target = self._connect()
        try:
            await self._measure(target)
            await self._verify(target)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None:
                raise
            task.uncancel()  # the measurements are worth more than a quick end
            return False
        finally:
            await target.close()
        return True

    async def _measure(self, target: Target) -> None:
        self._found = await target.find()
        config, work = self._config, self._work
        several = config.num_processes > 1
        clients = self._clients = (
            Clients(config, work, self._connect) if several else Sender(target, config, work)
        )
        await clients.warm_up()
        loop = asyncio.get_running_loop()
        num_due = self._num_due() if config.stop_when_missed else 0
        self._started_at, self._start = datetime.now(UTC), loop.time()
        sending = asyncio.create_task(clients.send_all(self._start))
        beside = [asyncio.create_task(self._sample(target)), asyncio.create_task(self._show())]
        beside.append(asyncio.create_task(self._end_when_missed(sending, num_due)))
        try:
            await sending
        except asyncio.CancelledError:
            if not self._is_stopped or _is_cancelled():
                raise
        finally:
            self._end = loop.time() - self._start
            for task in beside:
                task.cancel()
            self._watch(clients)

    async def _sample(self, target: Target) -> None:
        while True:
            sample = await target.sample(asyncio.get_running_loop().time() - self._start)
            if sample is None:
                return
            self._samples.append(sample)
            await asyncio.sleep(_SAMPLE_PERIOD)

    async def _show(self) -> None:
        while self._clients is not None:
            self._watch(self._clients)
            await asyncio.sleep(_WATCH_PERIOD)

    async def _end_when_missed(self, sending: asyncio.Task[None], num_due: int) -> None:
        """End the test as soon as it cannot keep the bounds for `num_due` requests any more."""
        config, clients = self._config, self._clients
        if not config.stop_when_missed or config.slo is None or clients is None:
            return
        while not is_lost(clients.records, self._due_window, config.slo, num_due):
            await asyncio.sleep(_WATCH_PERIOD)
        self._is_stopped = True
        sending.cancel()

    @property
    def _due_window(self) -> Window:
        return Window(self._config.warmup, self._config.window_end or math.inf)

    def _num_due(self) -> int:
        """Return how many requests of an open loop count, all turns of sessions among them."""
        times = arrival_times(self._config, self._work)
        counted = [index for index, time in enumerate(times) if self._due_window.has(time)]
        return sum(1 + len(self._work.ask(index).turns) for index in counted)

    async def _verify(self, target: Target) -> None:
        """Ask the samples again, one after the other, when nothing else is under way."""
        kept = self._clients.kept if self._clients is not None else []
        samples = [one for one in kept if one.is_sample]
        self._num_unverified = len(samples)
        for one in samples:
            with suppress(CallFailed, TypeError, ValueError):
                again = await target.send(_again(one), keep=True)
                self._verified.append(difference(one.index, again.answer or {}, one.answer))
                self._num_unverified -= 1

    @property
    def kept(self) -> Sequence[KeptAnswer]:
        """Answers that were kept, by request and turn."""
        kept = self._clients.kept if self._clients is not None else []
        return sorted(kept, key=lambda one: (one.index, one.turn))

    def _report(self, interrupted: bool) -> LoadReport:
        config, clients = self._config, self._clients
        records = sorted(clients.records if clients else [], key=lambda r: (r.index, r.turn))
        end = config.window_end
        if (interrupted or self._is_stopped) and self._end is not None:
            end = min(self._end, self._end if end is None else end)
        window = window_of(records, config.warmup, end)
        report = LoadReport(
            config=config,
            work=self._work.title,
            num_different=self._work.num_different,
            method=self._found.method,
            started_at=self._started_at,
            versions=self._found.versions,
            window=window,
            summary=summarize(records, window),
            records=tuple(records),
            checks=self._checks(records),
            server=tuple(self._samples),
            own=clients.own_load if clients and self._start else None,
            interrupted=interrupted,
        )
        return _judged(report)

    def _checks(self, records: Sequence[RequestRecord]) -> Checks:
        expected = self._clients.expected if self._clients else []
        checks = checks_of(expected, self._verified, self._num_unverified)
        not_compared = sum(record.ok and not record.check for record in records)
        return replace(checks, num_not_compared=not_compared if expected else 0)


def _judged(report: LoadReport) -> LoadReport:
    """Return the report with what depends on its goals and its client."""
    records, window, slo = report.records, report.window, report.config.slo
    names = sorted({record.kind for record in records})
    due = due_in(records, window)
    kinds = {
        name: summarize([record for record in due if record.kind == name], window)
        for name in names
        if len(names) > 1
    }
    invalid = _why_invalid(report.own, report.summary.send_delay)
    if slo is None:
        return replace(report, kinds=kinds, invalid=invalid)
    return replace(
        report,
        kinds=kinds,
        invalid=invalid,
        goodput=goodput(records, window, slo),
        goals=outcomes(records, window, slo),
    )


def _why_invalid(own: OwnLoad | None, delay: Distribution | None) -> tuple[str, ...]:
    """Return why figures are the client's: it was busy, or sent later than was due."""
    is_late = delay is not None and delay.p99 > MAX_DELAY
    if own is None or not (own.is_limit or is_late):
        return ()
    sent = f", requests sent {delay.p99 * 1000:.1f} ms late" if is_late and delay else ""
    if own.is_busy:
        said, way_out = "was the limit", "--processes, or a smaller load"
    else:
        said, way_out = "was kept waiting", "or a longer test, in which a moment counts less"
    return (
        f"the load test itself {said} ({own}{sent}): the server may be faster. Give it a "
        f"machine of its own, {way_out}",
    )


def _is_cancelled() -> bool:
    """Return whether somebody, as Ctrl-C, has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _again(kept: KeptAnswer) -> Ask:
    """Return a request as it was, with the seed that the server drew for it."""
    options = kept.ask.options
    if not kept.seed or "seed" in options or "beam" in options:
        return kept.ask
    return replace(kept.ask, options={**options, "seed": kept.seed})
