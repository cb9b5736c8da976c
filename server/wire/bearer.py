"""The worker's end of the wire to one gateway: takes its calls, and says what they are answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from engine.errors import Draining
from server.calls.call_server import AnsweredCall, ServerCall
from server.calls.deadlines import abort
from server.calls.grpc_core import Pairs
from server.calls.status import CallStatus, call_status
from server.wire import protocol
from server.wire.protocol import NUM_TAKEN, NUM_UNHEARD, NUM_UNTAKEN, metadata_of, pairs_of
from server.wire.work_pb2 import (
    MORE_OF_MESSAGE,
    MORE_UNSPECIFIED,
    Call,
    FromWorker,
    LogRecord,
    More,
    Record,
    State,
    ToWorker,
)
from server.wire.worker_log import WorkerLog

logger = logging.getLogger(__name__)

_STATE_PERIOD = 1.0  # seconds, where a gateway says no other
_RETRY_AFTER = 0.5  # seconds

Answer = Callable[["BearerCall"], Coroutine[Any, Any, None]]
_record: ContextVar[Record] = ContextVar("record")


def current_record() -> Record:
    """Return the record of the call that is being answered; its gateway gets it with the end.

    Without one it is read by no gateway.
    """
    return _record.get(None) or Record()


class Bearer:
    """Lets the calls of a gateway be answered, and sends what they say in one message.

    They are answered on the event loop.
    """

    def __init__(
        self,
        call: ServerCall,
        answer: Answer,
        state: Callable[[], State],
        log: WorkerLog | None = None,
    ) -> None:
        """`answer` answers one of the calls; `state` says how the worker is, models and all.

        A gateway that wants it is given what comes to `log`.
        """
        self.only_watches = False  # its gateway sends no calls
        self._call = call
        self._answer = answer
        self._state = state
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, BearerCall] = {}
        self._said = FromWorker()
        self._has_gone = asyncio.Event()  # the message of now
        self._chunk = asyncio.Lock()  # one of all calls goes at a time
        self._told_models: object = None
        self._has_news = asyncio.Event()  # something is to be sent, or the wire is to end
        self._is_closed = False
        self._num_unheard = 0  # messages that the gateway has not looked at, as far as it has told
        self._room = asyncio.Event()  # for another message
        self._room.set()

    async def carry(self) -> None:
        """Take calls until `close`, or cancelled because the gateway has gone."""
        if (first := await self._call.read()) is aio.EOF:  # it has gone
            return
        gateway = ToWorker.FromString(first).hello
        own = protocol.hello()
        if mismatch := protocol.mismatch(gateway, own):
            logger.error("%s", mismatch)
            await self._call.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        self._said.hello.CopyFrom(own)
        self.only_watches = gateway.only_watches
        telling = self._loop.create_task(self._tell_states(gateway.state_period or _STATE_PERIOD))
        self._read()
        try:
            with ExitStack() as stack:
                if self._log is not None and gateway.wants_log:
                    stack.enter_context(self._log.given_to(self._say_record))
                while not self._is_closed or self._has_news.is_set():
                    await self._has_news.wait()
                    self._has_news.clear()
                    said, self._said = self._said, FromWorker()
                    gone, self._has_gone = self._has_gone, asyncio.Event()
                    await self._call.write(said.SerializeToString())
                    gone.set()
        finally:
            telling.cancel()
            self._is_closed = True
            for call in tuple(self._calls.values()):
                call.cancel()
        stopping = Draining("this worker is stopping; ask again", _RETRY_AFTER)
        await abort(self._call, call_status(stopping, ""))  # the client knows its id

    def close(self) -> None:
        """End the wire, and its calls: what comes now is to be asked of others."""
        self._is_closed = True
        self._has_news.set()

    def send_state(self) -> None:
        """Send the state of the worker."""
        state = self._state()
        models = state.models.SerializeToString(deterministic=True)
        if models == self._told_models and not self._said.state.HasField("models"):
            state.ClearField("models")
        self._told_models = models
        self.say().state.CopyFrom(state)

    def say(self) -> FromWorker:
        """Return what is sent next, to be added to before the event loop goes on."""
        self._has_news.set()
        return self._said

    def say_message(self, number: int, message: bytes) -> None:
        """Send a message of a call."""
        said = self.say()
        said.numbers.append(number)
        said.messages.append(message)
        self._count()

    async def say_long(self, number: int, message: bytes) -> None:
        """Send a message in pieces, between which others go; return when the last has been sent."""
        for data, more in protocol.chunks_of(message, MORE_UNSPECIFIED):
            async with self._chunk:
                gone = self._has_gone
                self.say().chunks.add(number=number, data=data, more=more)
                self._count()
                await gone.wait()

    async def has_room(self) -> None:
        """Wait until the gateway has looked at most of what was said."""
        if not self._room.is_set():
            await self._room.wait()

    def _say_record(self, record: LogRecord) -> None:
        self.say().log.append(record)

    def leave(self, number: int) -> None:
        """Forget a call."""
        self._calls.pop(number, None)

    def _count(self) -> None:
        self._num_unheard += 1
        if self._num_unheard >= NUM_UNHEARD:
            self._room.clear()

    async def _tell_states(self, period: float) -> None:
        while True:
            self.send_state()
            await asyncio.sleep(period)

    def _read(self) -> None:
        self._call.receive(lambda data: self._loop.call_soon_threadsafe(self._take, data))

    def _take(self, data: bytes | None) -> None:
        if data is None or self._is_closed:
            self.close()
            return
        self._read()
        try:
            said = ToWorker.FromString(data)
            for asked in said.calls:
                if asked.number in self._calls:
                    raise DecodeError("a call is asked twice")
                call = self._calls[asked.number] = BearerCall(self, asked)
                call.answer(self._answer(call))
        except DecodeError:
            logger.error("a gateway has sent %d bytes that are no message of the wire", len(data))
            self.close()
            return
        self._num_unheard -= said.num_looked_at
        if self._num_unheard < NUM_UNHEARD:
            self._room.set()
        for chunk in said.chunks:
            if (found := self._calls.get(chunk.number)) is not None:
                found.take(chunk.data, chunk.more)
        for number in said.taken:
            if (found := self._calls.get(number)) is not None:
                found.was_taken()
        for number in said.cancelled:
            if (found := self._calls.get(number)) is not None:
                found.cancel()


class BearerCall(AnsweredCall):
    """One call of a gateway."""

    def __init__(self, bearer: Bearer, asked: Call) -> None:
        super().__init__(asyncio.get_running_loop(), asked.method, metadata_of(asked.metadata))
        self.request_id: str = asked.request_id
        self.num_waiting = asked.num_waiting if asked.HasField("num_waiting") else None
        self._bearer = bearer
        self._number: int = asked.number
        self._arrived = time.monotonic()
        self._deadline = self._arrived + asked.seconds if asked.seconds else None
        self._record = Record()  # until it is answered
        self._messages: deque[bytes] = deque()  # complete ones that were not read
        self._pieces: list[bytes] = []  # the next one, as far as it has come
        self._is_whole = False  # the request: nothing comes any more
        self._has_come: asyncio.Future[None] | None = None  # awaited until there is a message
        self._num_untaken = 0  # weight of what the gateway has not taken, as far as it has told
        self._room: asyncio.Future[None] | None = None  # awaited until some are taken
        self.take(asked.request, asked.more)

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, data: bytes, more: More.ValueType) -> None:
        """Take a piece of the request."""
        self._is_whole = more == MORE_UNSPECIFIED
        if self._pieces or more == MORE_OF_MESSAGE:
            self._pieces.append(data)
            if more == MORE_OF_MESSAGE:
                return
            data, self._pieces = b"".join(self._pieces), []
        self._messages.append(data)
        if self._has_come is not None and not self._has_come.done():
            self._has_come.set_result(None)

    def answer(self, answer: Coroutine[Any, Any, None]) -> None:
        """Answer the call by a coroutine."""
        self._begin(answer)

    def cancel(self) -> None:
        """Cancel what answers the call: nobody hears it any more."""
        if self._task is not None and not self._has_ended:
            self._has_ended = True
            self._bearer.leave(self._number)
            self._task.cancel()

    async def read(self) -> Any:
        """Return the next message, once there is one; aio.EOF behind the last."""
        while not self._messages:
            if self._is_whole:
                return aio.EOF
            self._has_come = self._loop.create_future()
            await self._has_come
        return self._messages.popleft()

    async def send_initial_metadata(self, metadata: Pairs) -> None:
        """Begin to answer, before there is a message."""
        self._bearer.say().begun.add(number=self._number, metadata=pairs_of(metadata))

    async def write(self, message: Any) -> None:
        """Send a message, once the gateway has taken enough of those before."""
        await self._bearer.has_room()
        while self._num_untaken >= NUM_UNTAKEN:
            self._room = self._loop.create_future()
            await self._room
        if long := self._say(message):
            await self._bearer.say_long(self._number, long)

    def was_taken(self) -> None:
        """Take in that the gateway has taken some messages."""
        self._num_untaken -= NUM_TAKEN
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Pairs = ()
    ) -> NoReturn:
        """End the call with an error; raises aio.AbortError, for then there is nothing to do."""
        self._end_with(CallStatus(code, details, tuple(trailing_metadata)))
        raise aio.AbortError("the call was aborted")

    async def finish(self, response: Any = None) -> None:
        """End the call with success; `response` is the one message of a unary call."""
        if response is not None and (long := self._say(response)):
            await self._bearer.say_long(self._number, long)
        self._end_with(CallStatus(grpc.StatusCode.OK, "", tuple(self._trailing_metadata)))

    async def _run(self, answer: Awaitable[None]) -> None:
        _record.set(self._record)
        await super()._run(answer)

    def _give_up(self) -> None:
        self._end_with(CallStatus(grpc.StatusCode.CANCELLED, "", ()))

    def _say(self, message: Any) -> bytes | None:
        """Send a message; return one that is to go in pieces."""
        data = self._serialized(message)
        self._num_untaken += protocol.weight(data)
        if len(data) > protocol.CHUNK:
            return data
        self._bearer.say_message(self._number, data)
        return None

    def _end_with(self, status: CallStatus) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._bearer.leave(self._number)
        self._record.seconds = time.monotonic() - self._arrived
        self._bearer.say().ended.add(
            number=self._number,
            code=status.code.value[0],
            details=status.message,
            metadata=pairs_of(status.trailing_metadata),
            record=self._record,
        )
