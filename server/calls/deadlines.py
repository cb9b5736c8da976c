"""Ends calls so that what they end with still reaches the client, and those without one quietly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

import grpc
from grpc import aio

from engine.errors import ExpiredInDecode
from server.calls.status import CallStatus

CLOSE_TIMEOUT = 1.0  # seconds in which calls that were ended tell their clients
_MARGIN_SHARE = 0.05  # share of the time that a call has
_MAX_ENGINE_MARGIN, _ENGINE_MARGIN_SHARE = 0.05, 0.1  # seconds, and share; see engine_deadline


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


@asynccontextmanager
async def in_time(context: Context, margin: float) -> AsyncIterator[None]:
    """Raise ExpiredInDecode `margin` seconds before a call's deadline, or less if it is short.

    gRPC ends an expired call without a status of ours, and if the two clocks differ as cancelled.
    If nothing can be sent any more, CancelledError is raised, which gRPC takes without a word.
    """
    remaining: float | None = context.time_remaining()  # the stubs know no call without one
    if remaining is not None:
        remaining -= min(margin, remaining * _MARGIN_SHARE)
    limit = asyncio.timeout(remaining)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        what = "the deadline passed before the answer was complete; allow more time"
        raise ExpiredInDecode(what) from None
    except aio.InternalError as error:
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
