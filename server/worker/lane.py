"""A lane of a gateway: one call of gRPC, in which many streams are asked for and answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from engine.errors import Draining
from server.call_server import ServerCall
from server.grpc_core import Pairs
from server.lane import (
    NUM_TAKEN,
    NUM_UNHEARD,
    NUM_UNTAKEN,
    OPEN,
    FromWorker,
    Metadata,
    ToWorker,
    metadata_of,
    pairs_of,
    weight,
)
from server.last_moment import abort
from server.status import CallStatus, call_status

logger = logging.getLogger(__name__)

_RETRY_AFTER = 0.5  # seconds
_FAILED = "the server failed; see its log"

Answer = Callable[["LaneCall"], Coroutine[Any, Any, None]]


class Lane:
    """Lets the calls that come in a lane be answered, and sends what they say in one message.

    They are answered on the event loop.
    """

    def __init__(self, call: ServerCall, answer: Answer) -> None:
        """`answer` answers one of the calls."""
        self._call = call
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, LaneCall] = {}
        self._said = FromWorker()
        self._has_news = asyncio.Event()  # something is to be sent, or the lane is to end
        self._is_closed = False
        self._num_unheard = 0  # messages that the gateway has not looked at, as far as it has told
        self._room = asyncio.Event()  # for another message
        self._room.set()

    async def carry(self) -> None:
        """Take calls until `close`, or cancelled because the gateway has gone."""
        await self._call.send_initial_metadata(OPEN)
        self._read()
        try:
            while not self._is_closed or self._has_news.is_set():
                await self._has_news.wait()
                self._has_news.clear()
                said, self._said = self._said, FromWorker()
                await self._call.write(said.SerializeToString())
        finally:
            self._is_closed = True
            for call in tuple(self._calls.values()):
                call.cancel()
        stopping = Draining("this worker is stopping; ask again", _RETRY_AFTER)
        await abort(self._call, call_status(stopping, ""))  # the client knows its id

    def close(self) -> None:
        """End the lane, and its calls: what comes now is to be asked of others."""
        self._is_closed = True
        self._has_news.set()

    def say(self) -> Any:
        """Return what is sent next, to be added to before the event loop goes on."""
        self._has_news.set()
        return self._said

    def say_message(self, number: int, message: bytes) -> None:
        """Send a message of a call."""
        said = self.say()
        said.numbers.append(number)
        said.messages.append(message)
        self._num_unheard += 1
        if self._num_unheard >= NUM_UNHEARD:
            self._room.clear()

    async def has_room(self) -> None:
        """Wait until the gateway has looked at most of what was said."""
        if not self._room.is_set():
            await self._room.wait()

    def leave(self, number: int) -> None:
        """Know a call no more."""
        self._calls.pop(number, None)

    def _read(self) -> None:
        self._call.receive(lambda data: self._loop.call_soon_threadsafe(self._take, data))

    def _take(self, data: bytes | None) -> None:
        if data is None or self._is_closed:
            self.close()
            return
        self._read()
        try:
            said = ToWorker.FromString(data)
        except DecodeError:
            logger.error("a gateway has sent %d bytes that are no message of a lane", len(data))
            self.close()
            return
        self._num_unheard -= said.num_heard
        if self._num_unheard < NUM_UNHEARD:
            self._room.set()
        for asked in said.asked:
            call = self._calls[asked.number] = LaneCall(self, asked)
            call.answer(self._answer(call))
        for number in said.taken:
            if (found := self._calls.get(number)) is not None:
                found.was_taken()
        for number in said.cancelled:
            if (found := self._calls.get(number)) is not None:
                found.cancel()


class LaneCall:
    """One call in a lane, answered by a task that takes it for an `aio.ServicerContext`."""

    def __init__(self, lane: Lane, asked: Any) -> None:
        """`asked` is the Asked of a ToWorker."""
        self.method: str = asked.method
        self.response_serializer: Callable[[Any], bytes] | None = None
        self._lane = lane
        self._number: int = asked.number
        self._request: bytes | None = asked.request
        self._metadata: Metadata = metadata_of(asked.metadata)
        self._deadline = time.monotonic() + asked.seconds if asked.seconds else None
        self._trailing_metadata: Pairs = ()
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._num_untaken = 0  # weight of what the gateway has not taken, as far as it has told
        self._room: asyncio.Future[None] | None = None  # awaited until some are taken

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> Pairs:
        """Return what the client sent besides its message."""
        return self._metadata

    def answer(self, answer: Coroutine[Any, Any, None]) -> None:
        """Let a coroutine answer the call."""
        self._task = asyncio.get_running_loop().create_task(self._run(answer))
        self._task.add_done_callback(lambda _: answer.close())  # cancelled, it may not have begun

    def cancel(self) -> None:
        """Cancel what answers the call: nobody hears it any more."""
        if self._task is not None and not self._has_ended:
            self._has_ended = True
            self._lane.leave(self._number)
            self._task.cancel()

    def add_done_callback(self, callback: Callable[[LaneCall], None]) -> None:
        """Call this when the answer has ended, well or not."""
        assert self._task is not None, "it is answered"
        self._task.add_done_callback(lambda _: callback(self))

    async def read(self) -> Any:
        """Return the message; aio.EOF behind it."""
        request, self._request = self._request, None
        return aio.EOF if request is None else request

    async def send_initial_metadata(self, metadata: Pairs) -> None:
        """Begin to answer, before there is a message."""
        self._lane.say().begun.add(number=self._number, metadata=pairs_of(metadata))

    async def write(self, message: Any) -> None:
        """Send a message, once the gateway has taken enough of those before."""
        await self._lane.has_room()
        while self._num_untaken >= NUM_UNTAKEN:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._say(message)

    def was_taken(self) -> None:
        """Take in that the gateway has taken some messages."""
        self._num_untaken -= NUM_TAKEN
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def set_trailing_metadata(self, metadata: Pairs) -> None:
        """Send this at the end of a call that succeeds."""
        self._trailing_metadata = metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Pairs = ()
    ) -> NoReturn:
        """End the call with an error; raises aio.AbortError, for then there is nothing to do."""
        self._end(CallStatus(code, details, tuple(trailing_metadata)))
        raise aio.AbortError("the call was aborted")

    async def finish(self, response: Any = None) -> None:
        """End the call with success; `response` is the one message of a unary call."""
        if response is not None:
            self._say(response)
        self._end(CallStatus(grpc.StatusCode.OK, "", tuple(self._trailing_metadata)))

    async def _run(self, answer: Coroutine[Any, Any, None]) -> None:
        try:
            await answer
        except asyncio.CancelledError:
            logger.debug("%s was cancelled", self.method)
        except aio.BaseError:  # it was aborted
            pass
        except Exception:
            logger.exception("%s failed", self.method)
            self._end(CallStatus(grpc.StatusCode.UNKNOWN, _FAILED, ()))
        finally:
            self._end(CallStatus(grpc.StatusCode.CANCELLED, "", ()))

    def _say(self, message: Any) -> None:
        data = self.response_serializer(message) if self.response_serializer else message
        self._num_untaken += weight(data)
        self._lane.say_message(self._number, data)

    def _end(self, status: CallStatus) -> None:
        """Say how the call ends, if it has not."""
        if self._has_ended:
            return
        self._has_ended = True
        self._lane.leave(self._number)
        self._lane.say().ended.add(
            number=self._number,
            code=status.code.value[0],
            details=status.message,
            metadata=pairs_of(status.trailing_metadata),
        )
