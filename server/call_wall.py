"""The outer wall of a server: how many calls, and how many bytes of requests, it holds at once.

gRPC's own wall, `maximum_concurrent_rpcs`, stands before health checks too and answers without
details, so this one is counted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from grpc import aio

from engine.errors import ExpiredInQueue, FieldViolation, MalformedMessage, QueueFull

_READ_TIMEOUT = 10.0  # seconds for the bytes of a request to come
_RETRY_AFTER = 1.0  # seconds
_CONNECTION_SHARE = 4  # the part of the places, one in so many, that one connection can have


class CallWall:
    """Counts calls and bytes, and refuses beyond the limits with QueueFull."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._num_calls = self._num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call while it is open."""
        if self._num_calls >= self._max_calls:
            raise QueueFull(
                f"{self._num_calls:,} calls are open here, the most that may be; "
                f"retry in {_RETRY_AFTER:g} s",
                _RETRY_AFTER,
            )
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count the bytes of a request while its call is open."""
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:  # one may be larger
            raise QueueFull(
                f"the open calls have {self._num_bytes:,} bytes, {num_bytes:,} more exceed "
                f"{self._max_bytes:,}; retry in {_RETRY_AFTER:g} s, or send less in a call",
                _RETRY_AFTER,
            )
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes


class RequestReader:
    """Reads the requests of calls behind a wall, so many at once that they fit its bytes.

    gRPC would read all of them before anybody could count. One connection has only a share of the
    places: its calls that bring no message keep others waiting on it alone.
    """

    def __init__(self, wall: CallWall, *, max_bytes: int, max_message_bytes: int) -> None:
        self._wall = wall
        num_places = max(1, max_bytes // max_message_bytes)
        self._share = max(1, num_places // _CONNECTION_SHARE)
        self._places = asyncio.Semaphore(num_places)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def read(self, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        """Give the one message of a call; its bytes count until the end.

        Raises QueueFull if there are too many bytes, MalformedMessage if the call has no message,
        ExpiredInQueue if none comes in time.
        """
        share = self._shares.setdefault(context.peer(), asyncio.Semaphore(self._share))
        async with share, self._places:
            try:
                async with asyncio.timeout(_READ_TIMEOUT):
                    message = await context.read()
            except TimeoutError:
                raise ExpiredInQueue(
                    f"its message did not come within {_READ_TIMEOUT:g} s; ask again"
                ) from None
        if message is aio.EOF:
            raise MalformedMessage([FieldViolation("request", "the call brought no message")])
        with self._wall.holding(len(message)):
            yield message
