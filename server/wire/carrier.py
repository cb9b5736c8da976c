"""The gateway's end of the wire to one worker: one call of gRPC, which carries all calls to it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from server.calls import grpc_core as core
from server.calls.grpc_core import CANCELLED, NO_FLAGS, Event
from server.wire import protocol
from server.wire.protocol import CHUNK, NUM_HEARD, Metadata, metadata_of, pairs_of
from server.wire.work_pb2 import (
    MORE_MESSAGES,
    MORE_UNSPECIFIED,
    Call,
    FromWorker,
    Hello,
    LogRecord,
    More,
    State,
    ToWorker,
)
from server.wire.worker_call import Client, End, WorkerCall

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part")  # any part of an answer

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LEAST_SECONDS = 1e-6  # 0 is no deadline


class Connection:
    """A connection to one worker, with a thread that takes what happens; one carrier at a time.

    grpc.aio would wake its event loop for every message, and once more when it has gone. Here the
    thread hands each message to the client's call, and the event loop hears of the end.
    """

    def __init__(
        self,
        address: str,
        options: Iterable[tuple[str, int | str]],
        credentials: grpc.ChannelCredentials | None = None,
        log: Callable[[LogRecord], None] | None = None,
        *,
        only_watches: bool = False,
    ) -> None:
        """Encrypt what is sent if there are credentials; hand what the worker logs to `log`.

        One that only watches is no gateway to the worker: it sends no calls.
        """
        inner = None if credentials is None else core.inner(credentials)
        self._channel = core.Channel(address.encode(), tuple(options), inner)
        self._log, self._only_watches = log, only_watches
        self._open: set[object] = set()
        self._is_closing = False
        self._closing = threading.Lock()  # nothing is started while the thread closes
        self.carrier = Carrier(self._open, log)  # it carries nothing before `carry`
        threading.Thread(target=self._follow, name=f"calls to {address}", daemon=True).start()

    def carry(self, state_period: float) -> Carrier:
        """Carry calls, if there is nothing yet that does.

        The worker says how it is at least every `state_period` seconds.
        """
        with self._closing:
            if self.carrier.has_ended:
                self.carrier = Carrier(self._open, self._log)
                if not self._is_closing:
                    wants_log, watches = self._log is not None, self._only_watches
                    own = protocol.hello(state_period, wants_log=wants_log, only_watches=watches)
                    self.carrier.start_at(self._channel, own)
            return self.carrier

    def close(self) -> None:
        """End all calls; the connection closes behind the last of them."""
        if self._is_closing:
            return
        with self._closing:
            self._is_closing = True
            waking = object()  # a call that ends at once, so that the thread sees it
            self._open.add(waking)
            operations = (core.send_metadata(()), core.send_close(), core.receive_status())
            ended = ((operations, lambda event: self._open.discard(waking)),)
            self._channel.integrated_call(NO_FLAGS, b"/", None, 0.0, (), None, ended)
        self.carrier.cancel()

    def _follow(self) -> None:
        """Pass on what happens to calls, in the thread, until the connection is closed."""
        while True:
            event = self._channel.next_call_event()
            try:
                if event.tag is not None:
                    event.tag(event)
            except Exception:
                logger.exception("what a worker has sent was not passed on")
            if self._is_closing:
                with self._closing:
                    if not self._open:
                        self._channel.close(CANCELLED, "the connection is closed")
                        return


class Carrier:
    """Carries calls until it ends; see work.proto.

    A call has the lock of its own before it has that of the carrier, never the other way round.
    """

    def __init__(
        self, open_calls: set[object], log: Callable[[LogRecord], None] | None = None
    ) -> None:
        """Count as open at the connection until this has ended."""
        self.mismatch = ""  # why the two sides cannot work together
        self._open_calls = open_calls
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._states: asyncio.Queue[State | None] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._is_known = False  # the worker has said hello
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, WorkerCall] = {}
        self._unsent: dict[int, Call] = {}  # by number, as the next one
        self._pieces: dict[int, deque[tuple[bytes, More.ValueType]]] = {}  # behind calls
        self._taken: list[int] = []
        self._cancelled: list[int] = []
        self._num_heard = 0  # messages, of which the worker was not told
        self._is_sending = False
        self._num_due = 0  # events that are to come
        self._end: End | None = End(_UNAVAILABLE, "it is not connected", ())
        self._call: Any = None

    def start_at(self, channel: Any, own: Hello) -> None:
        """Open the call, and say hello."""
        opening = (core.send_metadata(()), core.receive_status())
        beginning = (core.receive_metadata(),)
        self._own = own
        with self._lock:
            self._open_calls.add(self)
            self._end = None
            self._num_due = 2
            self._call = channel.integrated_call(
                NO_FLAGS,
                protocol.METHOD.encode(),
                None,
                None,
                (),
                None,
                ((opening, self._has_ended), (beginning, self._has_begun)),
            )
            self._give_out(ToWorker(hello=own))

    @property
    def has_ended(self) -> bool:
        """Whether it carries no calls any more."""
        return self._end is not None

    @property
    def end(self) -> End:
        """How it has ended, behind the last of its states."""
        assert self._end is not None, "it has ended"
        return self._end

    async def states(self) -> AsyncIterator[State]:
        """Return what the worker says of itself, until this has ended; for one task."""
        while (state := await self._states.get()) is not None:
            yield state

    def start(
        self,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
        client: Client | None,
        *,
        num_waiting: int | None = None,
        request_id: str = "",
        is_followed: bool = False,
    ) -> WorkerCall:
        """Send a request; hand the answer to a client as it comes, or keep the one message.

        A request that is followed goes on with `WorkerCall.send`. The worker is told how many
        calls wait for it. Behind the end, the call ends as one to a worker that is gone.
        """
        call = WorkerCall(client, self, next(self._numbers))
        (first, more), *rest = protocol.chunks_of(
            request, MORE_MESSAGES if is_followed else MORE_UNSPECIFIED
        )
        asked = Call(
            number=call.number,
            method=method,
            request=first,
            more=more,
            metadata=pairs_of(metadata),
            seconds=0.0 if timeout is None else max(timeout, _LEAST_SECONDS),
            num_waiting=num_waiting,
            request_id=request_id,
        )
        with self._lock:
            self._calls[call.number] = call
            self._unsent[call.number] = asked
            if rest:
                self._pieces[call.number] = deque(rest)
            self._send()
            end = self._end
        if end is not None:  # answers of the others may be about to come
            self._end_calls(end, (call.number,))
        return call

    def cancel(self) -> None:
        """End the calls, at the worker too."""
        if self._call is not None:
            self._call.cancel(CANCELLED, "the connection is closed")

    def send(self, number: int, message: bytes, more: More.ValueType) -> None:
        """Send another message of a request."""
        with self._lock:
            if number in self._calls:
                pieces = self._pieces.setdefault(number, deque())
                pieces.extend(protocol.chunks_of(message, more))
                self._send()

    def took(self, number: int, times: int) -> None:
        """Send the worker a credit for so many times NUM_TAKEN messages of a call."""
        with self._lock:
            self._taken += [number] * times
            self._send()

    def leave(self, number: int, *, is_cancelled: bool) -> None:
        """Forget a call."""
        with self._lock:
            if self._calls.pop(number, None) is None:
                return
            self._pieces.pop(number, None)
            if self._unsent.pop(number, None) is None and is_cancelled:
                self._cancelled.append(number)
                self._send()

    def _send(self) -> None:
        """Send what there is, unless something is under way.

        Beside calls, which are new or small, goes one piece of a request that is neither: each has
        its turn.
        """
        if self._is_sending or self._end is not None:
            return
        num_heard = self._num_heard if self._num_heard >= NUM_HEARD else 0
        if not (self._unsent or self._pieces or self._taken or self._cancelled or num_heard):
            return
        data = ToWorker(taken=self._taken, cancelled=self._cancelled, num_looked_at=num_heard)
        self._num_heard -= num_heard
        self._taken, self._cancelled = [], []
        num_bytes = 0
        while self._unsent and num_bytes < CHUNK:
            asked = self._unsent.pop(next(iter(self._unsent)))
            data.calls.append(asked)
            num_bytes += asked.ByteSize()
        number = next((one for one in self._pieces if one not in self._unsent), None)
        if number is not None:
            pieces = self._pieces.pop(number)
            piece, more = pieces.popleft()
            data.chunks.add(number=number, data=piece, more=more)
            if pieces:
                self._pieces[number] = pieces  # behind the others
        self._give_out(data)

    def _give_out(self, data: ToWorker) -> None:
        operation = (core.send_message(data.SerializeToString()),)
        self._is_sending = bool(self._call.operate(operation, self._has_gone))
        self._num_due += self._is_sending

    # In the thread of the worker's connection.

    def _has_begun(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._read()
        self._settle()

    def _has_gone(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._is_sending = False
            self._send()
        self._settle()

    def _has_come(self, event: Event) -> None:
        message = event.batch_operations[0].message()
        with self._lock:
            self._num_due -= 1
            if message is not None:
                self._read()
        if message is not None:
            self._hear(message)
        self._settle()

    def _has_ended(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._end = status_in(event)
        self._settle()

    def _read(self) -> None:
        if self._end is None:
            operation = (core.receive_message(),)
            self._num_due += bool(self._call.operate(operation, self._has_come))

    def _hear(self, message: bytes) -> None:
        try:
            said = FromWorker.FromString(message)
            if len(said.numbers) != len(said.messages):
                raise DecodeError("messages are not numbered")
            if self._log is not None:
                for record in said.log:
                    self._log(record)
        except (DecodeError, TypeError, ValueError):
            logger.error("a worker has sent %d bytes that are no message of the wire", len(message))
            self.cancel()
            return
        if not self._is_known:
            self._is_known = True
            self.mismatch = protocol.mismatch(self._own, said.hello)
        if self.mismatch:
            self.cancel()
            return
        if said.HasField("state"):
            self._tell(said.state)
        self._hand_out(said)

    def _tell(self, state: State | None) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._states.put_nowait, state)

    def _hand_out(self, said: FromWorker) -> None:
        """Give every call what the worker says in it: beginnings, then messages, then ends.

        A call goes on once it has all of it: its end goes with its last message.
        """
        for begun in said.begun:
            self._give(begun.number, WorkerCall.begin, metadata_of(begun.metadata))
        numbers = [*said.numbers]  # each look at a field makes an object
        for number, message in zip(numbers, said.messages, strict=True):
            if (call := self._calls.get(number)) is not None:
                call.take(message)
        for chunk in said.chunks:
            numbers.append(chunk.number)
            if (call := self._calls.get(chunk.number)) is not None:
                call.take_piece(chunk.data, chunk.more)
        for ended in said.ended:
            code = _CODES.get(ended.code, grpc.StatusCode.UNKNOWN)
            end = End(code, ended.details, metadata_of(ended.metadata), ended.record)
            self._give(ended.number, WorkerCall.finish, end)
        for number in dict.fromkeys(numbers):
            self._give(number, WorkerCall.go_on, None)
        with self._lock:
            self._num_heard += len(numbers)
            if self._num_heard >= NUM_HEARD:
                self._send()

    def _give(self, number: int, take: Callable[[WorkerCall, _Part], None], part: _Part) -> None:
        """Hand a part of an answer to its call, if that is still there."""
        if (call := self._calls.get(number)) is None:
            return
        try:
            take(call, part)
        except Exception:  # the others go on
            logger.exception("what a worker has sent was not passed on")

    def _settle(self) -> None:
        """End what is open once the call of gRPC has ended, and nothing of it is to come."""
        if self._end is None:
            return
        with self._lock:
            end = self._end
            if self._num_due:
                return
        self._open_calls.discard(self)
        self._end_calls(end, tuple(self._calls))
        self._tell(None)

    def _end_calls(self, status: End, numbers: Iterable[int]) -> None:
        """End calls as those of a worker that is gone, or in its own words."""
        if status.code is not _UNAVAILABLE:
            status = End(_UNAVAILABLE, f"the wire has ended: {status.message}", ())
        for number in numbers:
            self._give(number, WorkerCall.finish, status)


def status_in(event: Event) -> End:
    """Return how a call of gRPC has ended."""
    end = event.batch_operations[-1]
    metadata = tuple((key, value) for key, value in end.trailing_metadata() or ())
    return End(_CODES.get(end.code(), grpc.StatusCode.UNKNOWN), end.details() or "", metadata)
