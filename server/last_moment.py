"""Ends calls so that what they end with still reaches the client, and those without one quietly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

import grpc
from grpc import aio

from engine.errors import ExpiredInDecode
from server.status import CallStatus

LAST_WORDS = 1.0  # seconds in which calls that were ended tell their clients
_MARGIN_SHARE = 0.05  # of the time that a call has


class Context(Protocol):
    """What is asked of a call: an aio.ServicerContext, or a ServerCall."""

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
    """Raise ExpiredInDecode `margin` seconds before the deadline of a call, or less if it is short.

    gRPC ends an expired call without a status of ours, and if the two clocks differ as cancelled.
    Where nothing can be sent any more, CancelledError is raised, which gRPC takes without a word.
    """
    remaining: float | None = context.time_remaining()  # the stubs know no call without one
    limit = None if remaining is None else remaining - min(margin, remaining * _MARGIN_SHARE)
    timer = asyncio.timeout(limit)
    try:
        async with timer:
            yield
    except aio.InternalError as error:
        raise asyncio.CancelledError from error
    except TimeoutError:
        if not timer.expired():
            raise
        raise ExpiredInDecode(
            "the deadline passed before the answer was complete; allow more time"
        ) from None


async def abort(context: Context, status: CallStatus) -> NoReturn:
    """End a call with a CallStatus; raise CancelledError if nothing can be sent any more."""
    try:
        await context.abort(status.code, status.message, status.trailing_metadata)
    except aio.InternalError as error:
        raise asyncio.CancelledError from error
