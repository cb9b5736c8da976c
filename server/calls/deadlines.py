"""Ends calls so that what they end with still reaches the client, and those without one quietly."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc
from grpc import aio

from engine.errors import ExpiredInDecode
from server.calls.status import CallStatus

CLOSE_TIMEOUT = 1.0  # seconds in which calls that were ended tell their clients
_MARGIN_SHARE = 0.05  # share of the time that a call has
_MAX_ENGINE_MARGIN, _ENGINE_MARGIN_SHARE = 0.05, 0.1  # seconds, and share; see engine_deadline
_NEAR, _LOOK_PERIOD = 1.0, 0.5  # seconds to a deadline that gets a timer, between two looks for it


class Context(Protocol):
    """A call: an aio.ServicerContext, or a ServerCall."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call."""


class Deadlines:
    """The deadlines of calls; an event loop has one timer for all of them that are not near.

    Most calls end long before, and a timer for each costs as much as finding their worker.
    """

    def __init__(self) -> None:
        self._far: set[InTime] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, one: InTime) -> None:
        """Make a block expire at its time, unless `leave` comes before."""
        loop = asyncio.get_running_loop()
        if one.ends < loop.time() + _NEAR:
            one.set_timer(loop)
            return
        self._far.add(one)
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_PERIOD, self._look, loop)

    def leave(self, one: InTime) -> None:
        """Forget a block."""
        self._far.discard(one)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        near = [one for one in self._far if one.ends < loop.time() + _NEAR]
        for one in near:
            self._far.discard(one)
            one.set_timer(loop)
        self._timer = loop.call_later(_LOOK_PERIOD, self._look, loop) if self._far else None


class InTime:
    """Raises ExpiredInDecode `margin` seconds before a call's deadline, or less if it is short.

    gRPC ends an expired call without a status of ours, and if the two clocks differ as cancelled.
    If nothing can be sent any more, CancelledError is raised, which gRPC takes without a word.

    This and other blocks of every call are objects: a decorated generator costs several times more.
    """

    __slots__ = ("_deadlines", "_has_expired", "_num_cancels", "_task", "_timer", "ends")

    def __init__(self, context: Context, margin: float, deadlines: Deadlines) -> None:
        remaining: float | None = context.time_remaining()  # the stubs know no call without one
        self.ends = math.inf  # on the clock of the event loop
        if remaining is not None:
            now = asyncio.get_running_loop().time()
            self.ends = now + remaining - min(margin, remaining * _MARGIN_SHARE)
        self._deadlines = deadlines
        self._has_expired = False
        self._timer: asyncio.TimerHandle | None = None

    def set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire when the time has come."""
        self._timer = loop.call_at(self.ends, self._expire)

    def _expire(self) -> None:
        self._has_expired = True
        self._task.cancel()

    async def __aenter__(self) -> None:
        if self.ends == math.inf:
            return
        task = asyncio.current_task()
        assert task is not None, "it runs on an event loop"
        self._task, self._num_cancels = task, task.cancelling()
        self._deadlines.watch(self)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._deadlines.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._has_expired:  # as in asyncio.timeout: others may have cancelled the task, too
            is_last = self._task.uncancel() <= self._num_cancels
            if is_last and isinstance(error, asyncio.CancelledError):
                raise ExpiredInDecode(
                    "the deadline passed before the answer was complete; allow more time"
                ) from None
        if isinstance(error, aio.InternalError):
            raise asyncio.CancelledError from error


def engine_deadline(context: Context) -> float | None:
    """Return when an engine must end a call, on the monotonic clock; None: never.

    It is a little before its client does, so that the answer can say where the time went.
    """
    remaining: float | None = context.time_remaining()  # the stubs know no call without one
    if remaining is None:
        return None
    return time.monotonic() + remaining - min(_MAX_ENGINE_MARGIN, remaining * _ENGINE_MARGIN_SHARE)


async def abort(context: Context, status: CallStatus) -> NoReturn:
    """End a call with a CallStatus; raise CancelledError if nothing can be sent any more."""
    try:
        await context.abort(status.code, status.message, status.trailing_metadata)
    except aio.InternalError as error:
        raise asyncio.CancelledError from error
