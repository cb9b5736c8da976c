"""The steps of a generating engine in a process of their own, as the worker's event loop sees them.

There the model has an interpreter for itself: a device that computes does not wait until streams
and calls have had their turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from engine.background import in_background
from engine.config import EngineConfig
from engine.errors import EngineFailure, TokenweirError
from engine.generation.core import StepTimes
from engine.generation.engine_loop import Abort, Stop
from engine.generation.parts import MakeParts, Tell
from engine.generation.steps import Receive
from engine.lifecycle.lifecycle import EngineState, FailOpen, Lifecycle, WarmUpResult, lost
from engine.lifecycle.step_watch import StepState
from engine.own_process.messages import (
    Ask,
    Asked,
    Begin,
    Begun,
    Compile,
    Compiled,
    Failed,
    Loaded,
    Progress,
    StartMessage,
    Status,
    StepOutputs,
)
from engine.own_process.wire import Unpacker, Wire, packed
from engine.requests.load import LoadSnapshot
from engine.requests.request import Constraint
from engine.scheduling.sequence import TokenRequest
from engine.step_measures import StepMeasures

_PROGRAM = "from engine.own_process.engine_host import main; main()"
# They end the worker, which lets requests end before it ends its engine; a terminal and a service
# manager send them to every process.
_WORKERS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_log = logging.getLogger(__name__)


class EngineProcess(Lifecycle):
    """A process that makes steps, its lifecycle, and its Constraints; see Steps.

    Both directions share one pair of sockets: all commands of one turn of the event loop are one
    message, and so are the outputs of a step. A worker that is slow to read lets the engine wait.
    """

    def __init__(
        self, name: str, make: MakeParts, max_step_seconds: float, *, niceness: int, tell: Tell
    ) -> None:
        """Start the process and return once it has loaded the model, `name`.

        `make` is pickled, and called there. Raises what it raises, or EngineFailure if the process
        ends. The process gives way to others by `niceness` when processors are short.
        """
        super().__init__(name, "engine process", max_step_seconds)
        self._tell = tell
        self._process, self._wire = _start()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[Asked] = []
        self._num_added = 0
        load = LoadSnapshot(0, 0, 0, 0.0, 0.0)
        self._status = Status(load, 0, StepState(), StepTimes(), StepMeasures())
        self._num_unanswered = 0  # questions how it is
        self._numbers = count()
        self._compiling: dict[int, Future[None]] = {}
        try:
            level = logging.getLogger("engine").getEffectiveLevel()
            with suppress(ConnectionError):  # it has ended already, which is told below
                self._wire.send(StartMessage(name, make, niceness, level))
            self.config: EngineConfig = self._wait_until_loaded()
        except BaseException:
            self._end_at_once()
            raise

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    # Steps

    @property
    def lifecycle(self) -> EngineProcess:
        """Its own."""
        return self

    async def start(self, receive: Receive, fail_open: FailOpen) -> None:
        """Let the model be tried out, then take requests; see Steps."""
        self._receive = receive
        await self._begin(fail_open)

    def add(self, request: TokenRequest) -> None:
        """Let a request be scheduled."""
        self._num_added += 1
        self._send(request)

    def abort(self, key: int) -> None:
        """Let a request end, of which nothing more is wanted."""
        self._send(Abort(key))

    def end(self) -> None:
        """Let the process end after the step in flight."""
        if self._loop is None:
            self._end_at_once()
        else:
            self._send(Stop())

    def load(self) -> LoadSnapshot:
        """Return how busy the engine was when it told last, with what it was given since."""
        load, num_unknown = self._status.load, self._num_added - self._status.num_added
        return replace(load, waiting=load.waiting + num_unknown)

    @property
    def times(self) -> StepTimes:
        """The times of all steps so far."""
        return self._status.times

    @property
    def measures(self) -> StepMeasures:
        """The measures of all steps so far."""
        return self._status.measures

    # Constraints

    def compile(self, constraint: Constraint, given_ids: Sequence[int] = ()) -> None:
        """Let a constraint be compiled where it is followed; see Constraints."""
        assert self._loop is not None, "it has started"
        compiled = Future[None]()
        asked = Compile(next(self._numbers), constraint, tuple(given_ids))
        self._loop.call_soon_threadsafe(self._let_compile, asked, compiled)
        compiled.result()

    def _let_compile(self, asked: Compile, compiled: Future[None]) -> None:
        if self._gone.is_set():
            return compiled.set_exception(lost())
        self._compiling[asked.number] = compiled
        self._send(asked)

    # Lifecycle

    async def _try_out(self) -> WarmUpResult:
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[WarmUpResult] = self._loop.create_future()
        self._gone = asyncio.Event()  # nothing more comes
        self._transport, _ = await self._loop.create_unix_connection(
            lambda: _Receiver(self, self._wire.unpacker), sock=self._wire.socket
        )
        for message in self._wire.unread():
            self.take(message)
        self._unsent.append(Begin())
        self._send_all()
        return await self._begun

    def _is_running(self) -> bool:
        return self._process.poll() is None

    async def _wait_until_stuck(self) -> None:
        await self._step_watch.wait_until_over(self._ask)
        self._process.kill()

    async def _join(self) -> None:
        if self._loop is None:  # it was never begun, and is ended
            return
        await self._step_watch.join(self._gone.is_set)
        self._process.kill()
        await self._gone.wait()
        await self._ending

    def _ask(self) -> None:
        """Ask how the engine is; while it does not answer, it counts as in a step."""
        self._send(Ask())
        if self._num_unanswered:
            since = time.monotonic() - self._num_unanswered * self._step_watch.pause
            self._step_watch.follow(StepState(since, self._step_watch.consecutive_failures))
        self._num_unanswered += 1

    def _end_at_once(self) -> None:
        self._process.kill()
        self._process.wait()
        self._wire.socket.close()

    # Messages

    def _wait_until_loaded(self) -> EngineConfig:
        while True:
            try:
                message = self._wire.receive()
            except EOFError:
                how = _ending(self._process.wait())
                raise self._ended_early("loaded the model", how) from None
            if isinstance(message, Loaded):
                return message.config
            if isinstance(message, Failed):
                raise message.error
            self.take(message)

    def _send(self, asked: Asked) -> None:
        """Send what is asked together with all else of this turn of the event loop."""
        if not self._unsent:
            assert self._loop is not None, "it has started"
            self._loop.call_soon(self._send_all)
        self._unsent.append(asked)

    def _send_all(self) -> None:
        if self._transport is None:  # it follows with Begin
            return
        unsent, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.write(packed(unsent))

    def take(self, message: object) -> None:
        """Take in a message of the process."""
        match message:
            case StepOutputs():
                if message.status is not None:
                    self._take_status(message.status)
                self._receive(message.outputs)
            case Status():
                self._take_status(message)
            case Compiled():
                _settle(self._compiling.pop(message.number), message.error)
            case Begun():
                self._begun.set_result(message.result)
            case Failed():
                self._begun.set_exception(message.error)
            case Progress():
                self._tell(message.line)
            case logging.LogRecord():
                logger = logging.getLogger(message.name)
                if logger.isEnabledFor(message.levelno):
                    logger.handle(message)

    def _take_status(self, status: Status) -> None:
        self._status, self._num_unanswered = status, 0
        self._step_watch.follow(status.step)

    def ended(self) -> None:
        """End what is open: nothing more comes."""
        self._gone.set()
        is_lost = self.state in (EngineState.RUNNING, EngineState.DRAINING)
        if is_lost:
            self._fail(lambda request_id: lost())
        while self._compiling:
            _settle(self._compiling.popitem()[1], lost())
        tell = partial(self._tell_end, is_lost)
        self._ending = in_background("the end of an engine", tell, restart_pause=None)

    async def _tell_end(self, is_lost: bool) -> None:
        how = _ending(await asyncio.to_thread(self._process.wait))
        if not self._begun.done():
            self._begun.set_exception(self._ended_early("tried the model out", how))
        elif is_lost:
            _log.error("the process of the engine of %s has ended: %s", self.name, how)

    def _ended_early(self, what: str, how: str) -> TokenweirError:
        return EngineFailure(
            f"the process of the engine of {self.name} has ended while it {what}: {how}; what it "
            "wrote to the standard error may say why"
        )


class _Receiver(asyncio.Protocol):
    """Receives the messages of the process on the event loop; back pressure stays in the socket."""

    def __init__(self, process: EngineProcess, unpacker: Unpacker) -> None:
        self._process = process
        self._unpacker = unpacker

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.push(data):
            self._process.take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._process.ended()


def _start() -> tuple[subprocess.Popen[bytes], Wire]:
    """Start a process that is to be an engine, and return it with its wire.

    It has a command of its own: multiprocessing would run the program that is served from once
    more, and keeps a process beside. It ends with the wire, for the kernel's signal at a parent's
    death comes at the end of the thread that has started it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WORKERS_SIGNALS)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # that of the worker may be read by a program
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, Wire(ours)


def _settle(waiting: Future[None], error: Exception | None) -> None:
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)


def _ending(status: int) -> str:
    """Say how a process has ended, by its exit status."""
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
