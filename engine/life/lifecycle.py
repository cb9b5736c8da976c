"""The life of an engine: its states, what it refuses in them, its health, its start and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from enum import Enum

from engine.background import in_background
from engine.errors import Draining, EngineFailure, ReplicaLost, Starting, TokenweirError
from engine.life.step_watch import StepWatch
from engine.life.trial import Trial

_log = logging.getLogger(__name__)

_MAX_CONSECUTIVE_FAILURES = 3  # of steps, before the engine says it is not healthy
_RETRY_AFTER = 1.0  # seconds, while starting or draining

ErrorOf = Callable[[str], TokenweirError]  # what a request ends with, by its id
FailOpen = Callable[[ErrorOf], None]  # ends every open request, on the event loop


class EngineState(Enum):
    """Where an engine is in its life, in order; it can fail from any state on that has a thread."""

    NEW = "new"
    WARMING = "warming"  # the model is tried out
    RUNNING = "running"
    DRAINING = "draining"  # nothing new is taken
    STOPPED = "stopped"
    FAILED = "failed"  # the thread is dead or stuck


class Lifecycle:
    """Starts the thread of an engine, watches it, and ends it; the same for every engine.

    The thread first tries the model out: what a device captures there, it repeats only there. Then
    it serves until it is told to end. The state changes on the event loop, and any thread reads it.
    """

    def __init__(
        self,
        name: str,
        thread_name: str,
        warm_up: Callable[[], Trial],
        max_step_seconds: float,
        *,
        niceness: int,
    ) -> None:
        """`name` is the model's; `warm_up` runs it before the first request.

        By `niceness` the thread gives way to the others of this process where processors are short.
        """
        self.name = name
        self._thread_name = thread_name
        self._warm_up = warm_up
        self._niceness = niceness
        self._has_warmed_up = threading.Event()
        self._trial: Trial | None = None
        self._warm_up_error: Exception | None = None
        self._step_watch = StepWatch(name, max_step_seconds)
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.state = EngineState.NEW

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before requests are taken."""
        return self.state in (EngineState.NEW, EngineState.WARMING)

    @property
    def is_invariant(self) -> bool:
        """Whether the trial has shown the same bits alone and among others."""
        return self._trial is not None and self._trial.is_batch_invariant

    @property
    def healthy(self) -> bool:
        """False if the thread is not running, or stuck, or the last steps all failed."""
        if self.state not in (EngineState.RUNNING, EngineState.DRAINING):
            return False
        runs = self._thread is not None and self._thread.is_alive()
        return runs and self._step_watch.consecutive_failures < _MAX_CONSECUTIVE_FAILURES

    def refuse_if_closed(self) -> None:
        """Raise Starting, ReplicaLost or Draining unless the engine is running."""
        if self.is_warming:
            raise Starting("the model is still being loaded; try again", _RETRY_AFTER)
        if self.state is EngineState.FAILED:
            raise lost()
        if self.state is not EngineState.RUNNING:
            raise draining()

    async def start(self, serve: Callable[[], None], fail_open: FailOpen) -> None:
        """Try the model out, then call `serve` in the same thread; PackageError if it fails.

        If the thread dies or a step takes too long, `fail_open` is called on this event loop.
        """
        if self.state is not EngineState.NEW:
            raise RuntimeError(f"an engine starts once; this one is {self.state.value}")
        self.state = EngineState.WARMING
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(serve, fail_open), name=self._thread_name, daemon=True
        )
        self._thread.start()
        await asyncio.to_thread(self._has_warmed_up.wait)
        if self._warm_up_error is not None:
            raise self._warm_up_error
        if self.state is not EngineState.WARMING:  # stopped meanwhile
            return
        self.state = EngineState.RUNNING
        self._watching = in_background(
            f"watching {self._thread_name}", lambda: self._fail_when_stuck(fail_open)
        )

    async def stop(
        self, grace: float, idle: Callable[[], Awaitable[object]], end: Callable[[], None]
    ) -> None:
        """Refuse requests, give `idle` so many seconds to return, then `end` what serves.

        Returns once the thread has ended, or is known to be stuck.
        """
        was_running = self.state is EngineState.RUNNING
        self.state = EngineState.DRAINING
        if was_running and grace > 0:
            try:
                await asyncio.wait_for(idle(), grace)
            except TimeoutError:
                _log.info("requests to %s are open after %g s", self.name, grace)
        self.state = EngineState.STOPPED
        end()
        if self._thread is not None:
            await self._step_watch.join(self._thread)
        if self._watching is not None:
            self._watching.cancel()

    def step(self) -> AbstractContextManager[None]:
        """Return what the engine's thread is inside of for a step; one that raises has failed."""
        return self._step_watch

    def call_on_loop(self, function: Callable[..., None], *args: object) -> bool:
        """Let the event loop call a function; False if it is closed, and with it every request."""
        assert self._loop is not None, "who calls runs in the engine's thread"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            _log.warning("the event loop is closed; the engine of %s stops", self.name)
            return False
        return True

    def _run(self, serve: Callable[[], None], fail_open: FailOpen) -> None:
        if sys.platform == "linux":  # elsewhere it is the niceness of the whole process
            os.nice(self._niceness)
        self._try_out()
        if self._warm_up_error is not None:
            return
        try:
            serve()
        except Exception:
            _log.exception("the engine of %s has stopped", self.name)
            self.call_on_loop(self._fail, fail_open, failure)

    def _try_out(self) -> None:
        try:
            self._trial = self._warm_up()
            self._step_watch.allow(self._trial.step_seconds)
        except Exception as error:
            self._warm_up_error = error
        self._has_warmed_up.set()

    async def _fail_when_stuck(self, fail_open: FailOpen) -> None:
        await self._step_watch.wait_until_over()
        self._fail(fail_open, lambda request_id: lost())

    def _fail(self, fail_open: FailOpen, error_of: ErrorOf) -> None:
        self.state = EngineState.FAILED
        fail_open(error_of)


def failure(request_id: str) -> TokenweirError:
    """Return what a request ends with when a step of it has failed."""
    return EngineFailure(
        f"{request_id}: the engine failed in the middle of it; try again, and if it fails again "
        "look for this request id in the server's log"
    )


def lost() -> TokenweirError:
    """Return what a request ends with when the engine no longer works."""
    return ReplicaLost("the engine here no longer works; ask again", _RETRY_AFTER)


def draining() -> TokenweirError:
    """Return what a request ends with when the engine takes no more, or ends what is open."""
    return Draining("the server is shutting down; try another or later", _RETRY_AFTER)
