"""Calls that the gateway itself makes to a worker: generated stubs, on the same connection.

A channel of grpc.aio would have a thread that waits for events beside those of the gateway. gRPC
lets any thread that waits read what has come, and that one would wake another for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from server.gateway.worker_calls import WorkerCalls
from server.lane import Metadata


class WorkerChannel:
    """The part of a channel that stubs use. Calls that fail raise WorkerFailed."""

    def __init__(self, calls: WorkerCalls) -> None:
        self._calls = calls

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Awaitable[Any]]:
        """Return what asks for the answer to a request."""

        # Users of stubs pass a timeout.
        async def ask(request: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
            call = self._calls.start_alone(method, request_serializer(request), (), timeout, None)
            try:
                await call.end()
            finally:
                call.cancel()  # does nothing once the call has ended
            assert call.response is not None, "without one its status is not OK"
            return response_deserializer(call.response)

        return ask

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[[Any], AsyncIterator[Any]]:
        """Return what asks for the answers to a request."""

        async def follow(request: Any) -> AsyncIterator[Any]:
            answers = _Answers()
            call = self._calls.start_alone(method, request_serializer(request), (), None, answers)
            ending = asyncio.ensure_future(call.end())
            ending.add_done_callback(lambda _: answers.put(None))
            try:
                while (message := await answers.next()) is not None:
                    yield response_deserializer(message)
                await ending
            finally:
                call.cancel()
                await asyncio.wait([ending])
                if not ending.cancelled():
                    ending.exception()  # seen, where whoever leaves has not waited for it

        return follow


class _Answers:
    """Takes messages in the thread of the connection, see Client; keeps them for the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, message: bytes | None) -> None:
        """Keep a message; None is the end."""
        self._messages.put_nowait(message)

    async def next(self) -> bytes | None:
        """Wait for the next one."""
        return await self._messages.get()

    def pass_metadata(self, metadata: Metadata, passed: Callable[[bool], object]) -> None:
        """Take what comes first."""
        passed(True)

    def pass_message(
        self, message: bytes, passed: Callable[[bool], object], *, is_followed: bool
    ) -> None:
        """Take a message."""
        self._loop.call_soon_threadsafe(self.put, message)
        passed(True)

    def pass_end(self, message: bytes | None, trailing_metadata: Metadata) -> bool:
        """Take the last message, if it comes so."""
        if message is not None:
            self._loop.call_soon_threadsafe(self.put, message)
        return True
