"""The streams that the client returns, and how one whose connection broke goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, Protocol, Self, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from tokenweir._answers import StreamAssembler
from tokenweir._channel import Metadata
from tokenweir._errors import (
    NotSupported,
    ResourceExhausted,
    TokenweirClientError,
    Unavailable,
    closed_under_way,
    error_from_call,
    is_task_cancelled,
    seconds_until,
)
from tokenweir._types import Generation
from tokenweir.received import ORIGIN_KEY, SeenMessages
from tokenweir.v1 import generation_service_pb2

_CANCEL_GRACE = 0.05  # seconds that a read in flight gets to end before its call is cancelled
_PAUSE, _MAX_PAUSE = 0.1, 2.0  # seconds before the second attempt, and before any
_PATIENCE = 60.0  # seconds after which a server that was lost is not waited for any more
_LOST = "REPLICA_LOST"  # nobody is there that could go on
_NO_RESULT = "the stream has not ended well; read it to its end to get the result"

CallT = TypeVar("CallT")
Request = generation_service_pb2.GenerateStreamRequest
_AsyncStreamCall: TypeAlias = grpc.aio.UnaryStreamCall[
    generation_service_pb2.GenerateStreamRequest,
    generation_service_pb2.GenerateStreamResponse,
]


class Resumption(Generic[CallT]):
    """Starts the calls of one stream: the first, and those that go on where one broke.

    A call that breaks counts as an attempt. A server that is not there, or has no room, is asked
    again and again: it is being started, or another one in its place.
    """

    def __init__(
        self,
        method: Callable[..., CallT],
        metadata: Metadata,
        request: Request,
        deadline: float | None,
        max_attempts: int,
    ) -> None:
        """`method` is that of a stub; `deadline` is that of `deadline_after`."""
        self.deadline = deadline
        self._method, self._metadata = method, metadata
        self._request = request
        self._num_left = max_attempts
        self._pause = _PAUSE
        self._give_up = 0.0  # when a server is not waited for any more
        self._origin = ""
        self._first_error: TokenweirClientError | None = None

    def begin(self) -> CallT:
        """Return a call, which is the first where nothing of a stream has come."""
        timeout = seconds_until(self.deadline)
        return self._method(self._request, timeout=timeout, metadata=self._metadata)

    def pause_after(self, error: grpc.RpcError) -> float:
        """Return the seconds after which the stream may go on; raise how it ends if it may not.

        It may after UNAVAILABLE, where it had begun and said where it is from.
        """
        typed = error_from_call(error, self.deadline)
        pairs = cast(grpc.Call, error).initial_metadata() or ()
        origin = next((str(value) for key, value in pairs if key == ORIGIN_KEY), "")
        self._origin = origin or self._origin
        if isinstance(typed, NotSupported) and self._first_error is not None:
            raise self._first_error from error  # whoever answers now cannot go on
        if origin or typed.reason == _LOST:
            self._note_break()
        passing = Unavailable if origin else (Unavailable, ResourceExhausted)
        if not isinstance(typed, passing) or not self._may_go_on():
            raise typed from error
        pause = max(self._pause, min(typed.retry_after or 0.0, _MAX_PAUSE))
        if (left := seconds_until(self.deadline)) is not None and left <= pause:
            raise typed from error
        self._first_error = self._first_error or typed
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        return pause

    def _note_break(self) -> None:
        self._num_left -= 1
        self._pause, self._give_up = _PAUSE, time.monotonic() + _PATIENCE

    def _may_go_on(self) -> bool:
        return bool(self._origin) and self._num_left > 0 and time.monotonic() < self._give_up

    def go_on(self, seen: SeenMessages) -> CallT:
        """Return a call that brings what is behind the messages that were seen.

        Raises Cancelled if the client was closed meanwhile.
        """
        self._request.resume_after = seen.num_messages
        del self._request.received[:]
        self._request.received.extend(seen.received())
        self._request.origin = self._origin
        try:
            return self.begin()
        except (ValueError, grpc.aio.UsageError) as error:  # the channel is
            raise closed_under_way() from error


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
