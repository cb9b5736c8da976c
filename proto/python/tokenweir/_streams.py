"""The streams that the client returns: pieces of text, then the whole answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Generic, Protocol, Self, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from tokenweir._answers import StreamAssembler
from tokenweir._errors import TokenweirClientError, closed_under_way, is_task_cancelled
from tokenweir._resuming import Resumption
from tokenweir._types import Generation
from tokenweir.v1 import generation_service_pb2

_CANCEL_GRACE = 0.05  # seconds that a read in flight gets to end before its call is cancelled
_NO_RESULT = "the stream has not ended well; read it to its end to get the result"

CallT = TypeVar("CallT")
_AsyncStreamCall: TypeAlias = grpc.aio.UnaryStreamCall[
    generation_service_pb2.GenerateStreamRequest,
    generation_service_pb2.GenerateStreamResponse,
]


class _StreamCall(Protocol):
    """The methods of grpc's own call object that are used."""

    def __iter__(self) -> Iterator[generation_service_pb2.GenerateStreamResponse]: ...

    def cancel(self) -> object: ...


class _Stream(Generic[CallT]):
    """A stream under way, and what has come of it."""

    def __init__(self, resumption: Resumption[CallT]) -> None:
        self._resumption = resumption
        self._call = resumption.begin()
        self._assembler = StreamAssembler()
        self._result: Generation | None = None
        self._closed = False

    @property
    def result(self) -> Generation:
        """The whole answer; RuntimeError before the end of the stream."""
        if self._result is None:
            raise RuntimeError(_NO_RESULT)
        return self._result


class TextStream(_Stream[_StreamCall], Iterator[str]):
    """The pieces of a text as they come; `result` holds the whole answer after the end.

    A stream that breaks with UNAVAILABLE goes on where it broke, if the server can do that; the
    client's `max_attempts` counts for that, too. Each time a server that is gone is waited for, up
    to a minute.

    Closing it before the end, or leaving its `with` block, cancels the call at the server.
    """

    def __next__(self) -> str:
        try:
            while not self._closed:
                try:
                    return self._next_text()
                except grpc.RpcError as error:
                    pause = self._resumption.pause_after(error)
                time.sleep(pause)
                if not self._closed:
                    self._call = self._resumption.go_on(self._assembler.seen)
        except TokenweirClientError:
            self.close()
            raise
        raise StopIteration

    def _next_text(self) -> str:
        """Return the next text; StopIteration behind the last, when the result is there."""
        for message in self._call:
            if text := self._assembler.feed(message):
                return text
        self._result = self._assembler.finish()
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the call; a call that has ended stays as it is."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncTextStream(_Stream[_AsyncStreamCall], AsyncIterator[str]):
    """A TextStream for asyncio; cancelling the task that reads it cancels the call, too."""

    _read: asyncio.Task[object] | None = None  # in flight, or the last one

    async def __anext__(self) -> str:
        try:
            while not self._closed:
                try:
                    text = await self._next_text()
                except grpc.RpcError as error:
                    await self._go_on(self._resumption.pause_after(error))
                    continue
                if text is None:
                    break
                return text
        except asyncio.CancelledError as error:
            was_closed = self._closed
            self._cancel()
            if is_task_cancelled():
                raise
            if not was_closed:
                raise closed_under_way() from error
        except TokenweirClientError:
            self._cancel()
            raise
        self._cancel()
        raise StopAsyncIteration

    async def _next_text(self) -> str | None:
        """Return the next text; None behind the last, when the result is there."""
        while (message := await self._next_message()) is not None:
            if text := self._assembler.feed(message):
                return text
        self._result = self._assembler.finish()
        return None

    async def _go_on(self, pause: float) -> None:
        await asyncio.sleep(pause)
        if not self._closed:
            self._call = self._resumption.go_on(self._assembler.seen)

    async def aclose(self) -> None:
        """End the call; a call that has ended stays as it is."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _next_message(self) -> generation_service_pb2.GenerateStreamResponse | None:
        # A task of its own, so that cancelling the reader does not cancel the read.
        self._read = asyncio.create_task(self._call.read())
        message = await asyncio.shield(self._read)
        if message is grpc.aio.EOF:
            return None
        return cast(generation_service_pb2.GenerateStreamResponse, message)

    def _cancel(self) -> None:
        """Cancel the call between two reads, or _CANCEL_GRACE later if the read does not end.

        grpcio 1.85 leaks some hundred bytes for a call cancelled in mid-read (grpc/grpc#43360).
        """
        self._closed = True
        if self._read is None or self._read.done():
            self._call.cancel()
            return
        late = asyncio.get_running_loop().call_later(_CANCEL_GRACE, self._call.cancel)

        def end(read: asyncio.Task[object]) -> None:
            late.cancel()
            self._call.cancel()
            if not read.cancelled():
                read.exception()  # seen: nobody waits for this read any more

        self._read.add_done_callback(end)
