"""Ends calls so that what they end with still reaches the client, and those without one quietly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
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


class InTime:
    """Raises ExpiredInDecode `margin` seconds before a call's deadline, or less if it is short.

    gRPC ends an expired call without a status of ours, and if the two clocks differ as cancelled.
    Where nothing can be sent any more, CancelledError is raised, which gRPC takes without a word.

    This and other blocks of every call are objects: a decorated generator costs several times more.
    """

    __slots__ = ("_timer",)

    def __init__(self, context: Context, margin: float) -> None:
        remaining: float | None = context.time_remaining()  # the stubs know no call without one
        limit = None if remaining is None else remaining - min(margin, remaining * _MARGIN_SHARE)
        self._timer = None if limit is None else asyncio.timeout(limit)

    async def __aenter__(self) -> None:
        if self._timer is not None:
            await self._timer.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            try:
                await self._timer.__aexit__(kind, error, traceback)
            except TimeoutError:
                raise ExpiredInDecode(
                    "the deadline passed before the answer was complete; allow more time"
                ) from None
        if isinstance(error, aio.InternalError):
            raise asyncio.CancelledError from error


async def abort(context: Context, status: CallStatus) -> NoReturn:
    """End a call with a CallStatus; raise CancelledError if nothing can be sent any more."""
    try:
        await context.abort(status.code, status.message, status.trailing_metadata)
    except aio.InternalError as error:
        raise asyncio.CancelledError from error
