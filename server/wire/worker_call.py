"""One call to a worker: its answer goes to the client in order, no faster than that takes it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import grpc
from grpc import aio

from server.calls.status import DETAILS_KEY, CallStatus
from server.wire.protocol import NUM_TAKEN, Metadata, weight
from server.wire.work_pb2 import MORE_MESSAGES, MORE_OF_MESSAGE, MORE_UNSPECIFIED, More, Record

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
_OK = grpc.StatusCode.OK


class Client(Protocol):
    """Takes what a worker sends, in any thread; ServerCall says how."""

    def pass_metadata(self, metadata: Metadata, passed: Callable[[bool], object]) -> None:
        """Take what comes first."""

    def pass_message(
        self, message: bytes, passed: Callable[[bool], object], *, is_followed: bool
    ) -> None:
        """Take a message, that is followed at once by another one or not."""

    def pass_end(self, message: bytes | None, trailing_metadata: Metadata) -> bool:
        """Take the end of an answer that succeeds, with its last message if that is to come.

        Return whether it has been sent.
        """


class WorkerFailed(Exception):
    """A call has ended at the worker, or on the way to it, with another status than OK."""

    def __init__(self, status: CallStatus, *, hangs: bool = False) -> None:
        """A worker that hangs does not answer any more; its calls were ended on this side."""
        super().__init__(status.message)
        self.status, self._hangs = status, hangs

    @property
    def is_workers_own(self) -> bool:
        """Whether the worker itself has ended the call, and not the way to it."""
        return any(key == DETAILS_KEY for key, _ in self.status.trailing_metadata)

    @property
    def crashed(self) -> bool | None:
        """Whether a lost worker crashed, as far as it shows here."""
        return False if self._hangs else self.is_workers_own or None


@dataclass(frozen=True)
class End(CallStatus):
    """How a call has ended at the worker."""

    record: Record | None = None  # None: the worker itself has not ended it


class Sender(Protocol):
    """The gateway's end of the wire, by which calls are sent. Any thread may use it."""

    def send(self, number: int, message: bytes, more: More.ValueType) -> None:
        """Send another message of a request."""

    def took(self, number: int, times: int) -> None:
        """Send the worker a credit for so many times NUM_TAKEN messages of a call."""

    def leave(self, number: int, *, is_cancelled: bool) -> None:
        """Forget a call."""


class WorkerCall:
    """A call that was started on the event loop.

    The thread of the worker's connection hands in what the wire brings. Methods with an underscore
    run there, and in the threads of the client's server.
    """

    def __init__(self, client: Client | None, sender: Sender, number: int) -> None:
        """Hand the answer to a client as it comes, or keep the one message of it."""
        self.number = number
        self.is_committed = False  # something of the answer has come
        self.initial_metadata: Metadata = ()
        self.response: bytes | None = None  # the message of a call that passes nothing on
        self._client = client
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Metadata] = self._loop.create_future()
        self._lock = threading.RLock()  # guards all below
        self._is_over = False  # here: nothing more is passed on
        self._is_passing = False
        self._waiting: deque[bytes] = deque()  # until the one before them has gone
        self._pieces: list[bytes] = []  # a message that has not come whole
        self._num_taken = 0  # weight of messages, of which the worker was not told
        self._status: End | None = None

    @property
    def status(self) -> End | None:
        """How it has ended at the worker; None: it has not, as far as is known."""
        return self._status

    async def end(self) -> Metadata:
        """Wait for the end of the answer; return the trailing metadata.

        Raises WorkerFailed, aio.InternalError if the client is gone, what it raises itself, and
        CancelledError after `cancel`.
        """
        return await self._end

    def cancel(self) -> None:
        """Pass nothing on any more, and tell the worker so; nothing once the call has ended."""
        with self._lock:
            self._is_over = True
        self._sender.leave(self.number, is_cancelled=self._status is None)
        self._end.cancel()

    def send(self, message: bytes, *, is_last: bool) -> None:
        """Send another message of a request that is followed by more."""
        self._sender.send(self.number, message, MORE_UNSPECIFIED if is_last else MORE_MESSAGES)

    # In the thread of the worker's connection.

    def begin(self, metadata: Metadata) -> None:
        """Take what comes first."""
        with self._lock:
            if self.is_committed:  # it has come before
                return
            self.initial_metadata = metadata
            if self._client is not None and metadata and not self._is_over:
                self.is_committed = True
                self._pass(self._client.pass_metadata, metadata, self._has_passed)

    def take(self, message: bytes) -> None:
        """Take a message, for `go_on` or `finish`."""
        with self._lock:
            if self._is_over:
                return
            self.is_committed = True
            if self._client is None:
                self.response = message
            else:
                self._waiting.append(message)

    def take_piece(self, data: bytes, more: More.ValueType) -> None:
        """Take a piece of a long message, likewise."""
        self._pieces.append(data)
        if more != MORE_OF_MESSAGE:
            message, self._pieces = b"".join(self._pieces), []
            self.take(message)

    def go_on(self, _: None) -> None:
        """Hand on what was taken."""
        with self._lock:
            self._go_on()

    def finish(self, status: End) -> None:
        """Take the end; nothing if it has come, and only the client has not taken all."""
        with self._lock:
            if self._status is None:
                self._status = status
                self._go_on()

    def _has_passed(self, is_there: bool) -> None:
        with self._lock:
            self._is_passing = False
            if not is_there:
                self._is_over = True
                self._tell(aio.InternalError("the client is gone"))
            self._go_on()

    def _go_on(self) -> None:
        """Hand on the next message once the one before it has gone; behind the last one the end.

        The worker may send others behind those that were handed on.
        """
        if self._is_passing:
            return
        if self._is_over:
            self._waiting.clear()
        # The last message of a good end waits for it.
        is_last_kept = self._status is not None and self._status.code is _OK
        if len(self._waiting) > is_last_kept and self._client is not None:
            message = self._waiting.popleft()
            more = bool(self._waiting)
            self._num_taken += weight(message)
            if times := self._num_taken // NUM_TAKEN:
                self._num_taken %= NUM_TAKEN
                self._sender.took(self.number, times)
            self._pass(self._client.pass_message, message, self._has_passed, is_followed=more)
        else:
            self._settle()

    def _pass(
        self, pass_on: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Hand something to the client; if it fails at that, the call ends with its error."""
        self._is_passing = True
        try:
            return pass_on(*given, **named)
        except Exception as error:
            self._is_over, self._is_passing = True, False
            self._tell(error)
            raise

    def _settle(self) -> None:
        """Publish the end, if that has come; the client has a good one first, with what waits."""
        if self._status is None:
            return
        self._sender.leave(self.number, is_cancelled=False)
        if self._status.code is not _OK:
            return self._tell(WorkerFailed(self._status))
        metadata, is_there = self._status.trailing_metadata, True
        if self._client is not None and not self._is_over:
            message = self._waiting.popleft() if self._waiting else None
            is_there = self._pass(self._client.pass_end, message, metadata)
        self._tell(metadata if is_there else aio.InternalError("the client is gone"))

    def _tell(self, end: Metadata | Exception) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._resolve, end)

    def _resolve(self, end: Metadata | Exception) -> None:
        if self._end.done():
            return
        if isinstance(end, Exception):
            self._end.set_exception(end)
        else:
            self._end.set_result(end)
