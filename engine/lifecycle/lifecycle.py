"""The lifecycle of an engine: its states and their refusals, its health, its start and stop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from engine.background import in_background
from engine.errors import Draining, EngineFailure, ReplicaLost, Starting, TokenweirError
from engine.lifecycle.step_watch import StepWatch

_log = logging.getLogger(__name__)

_MAX_CONSECUTIVE_FAILURES = 3  # steps, before the engine says it is not healthy
_RETRY_AFTER = 1.0  # seconds, while starting or draining

ErrorOf = Callable[[str], TokenweirError]  # the error that a request ends with, by its id
FailOpen = Callable[[ErrorOf], None]  # ends every open request, on the event loop


@dataclass(frozen=True)
class WarmUpResult:
    """How the model behaves on this machine, with the engine's own settings."""

    is_batch_invariant: bool = True  # the same bits alone and among others
    step_seconds: float = 0.0  # that the largest step takes; 0: it was not looked at


class EngineState(Enum):
    """The states of an engine, in order; it can fail from any state in which it runs."""

    NEW = "new"
    WARMING = "warming"  # the model is tried out
    RUNNING = "running"
    DRAINING = "draining"  # nothing new is taken
    STOPPED = "stopped"
    FAILED = "failed"  # its thread or process is dead or stuck


class Lifecycle(ABC):
    """Starts what runs an engine, watches it, and ends it; the same for every engine.

    That is a thread or a process: a class of each says how. It first tries the model out, then it
    serves until it is told to end. The state changes on the event loop, and any thread reads it.
    """

    def __init__(self, name: str, what: str, max_step_seconds: float) -> None:
        """`name` is the model's; `what` is that of the thread or process."""
        self.name = name
        self._what = what
        self._step_watch = StepWatch(name, max_step_seconds)
        self._warm_up_result: WarmUpResult | None = None
        self._fail_open: FailOpen | None = None
        self._watching: asyncio.Task[None] | None = None
        self.state = EngineState.NEW

    @abstractmethod
    async def _try_out(self) -> WarmUpResult:
        """Begin to run, return what trying the model out has shown; it serves from then on."""

    @abstractmethod
    def _is_running(self) -> bool:
        """Say whether what runs the engine is still there."""

    @abstractmethod
    async def _join(self) -> None:
        """Wait for the end of what runs, unless it is known to be stuck."""

    async def _wait_until_stuck(self) -> None:
        await self._step_watch.wait_until_over()

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before requests are taken."""
        return self.state in (EngineState.NEW, EngineState.WARMING)

    @property
    def is_invariant(self) -> bool:
        """Whether the warm-up has shown the same bits alone and among others."""
        return self._warm_up_result is not None and self._warm_up_result.is_batch_invariant

    @property
    def healthy(self) -> bool:
        """False if what runs the engine is gone, or stuck, or the last steps all failed."""
        if self.state not in (EngineState.RUNNING, EngineState.DRAINING):
            return False
        fails = self._step_watch.consecutive_failures >= _MAX_CONSECUTIVE_FAILURES
        return self._is_running() and not fails

    def refuse_if_closed(self) -> None:
        """Raise Starting, ReplicaLost or Draining unless the engine is running."""
        if self.is_warming:
            raise Starting("the model is still being loaded; try again", _RETRY_AFTER)
        if self.state is EngineState.FAILED:
            raise lost()
        if self.state is not EngineState.RUNNING:
            raise draining()

    async def _begin(self, fail_open: FailOpen) -> None:
        """Try the model out, then serve; raise what fails in the warm-up.

        If it is lost later, `fail_open` is called on this event loop.
        """
        if self.state is not EngineState.NEW:
            raise RuntimeError(f"an engine starts once; this one is {self.state.value}")
        self.state, self._fail_open = EngineState.WARMING, fail_open
        self._warm_up_result = await self._try_out()
        self._step_watch.allow(self._warm_up_result.step_seconds)
        if self.state is not EngineState.WARMING:  # stopped meanwhile
            return
        self.state = EngineState.RUNNING
        self._watching = in_background(f"watching {self._what}", self._fail_when_stuck)

    async def stop(
        self, grace: float, idle: Callable[[], Awaitable[object]], end: Callable[[], None]
    ) -> None:
        """Refuse requests, give `idle` so many seconds to return, then `end` what serves.

        Returns once it has ended, or is known to be stuck.
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
        await self._join()
        if self._watching is not None:
            self._watching.cancel()

    async def _fail_when_stuck(self) -> None:
        await self._wait_until_stuck()
        self._fail(lambda request_id: lost())

    def _fail(self, error_of: ErrorOf) -> None:
        self.state = EngineState.FAILED
        if self._fail_open is not None:
            self._fail_open(error_of)


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
