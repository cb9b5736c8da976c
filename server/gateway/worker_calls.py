"""Calls to a worker, whose messages are handed to clients without the event loop.

grpc.aio wakes its event loop for every message, and once more when it has gone. This stands on
cygrpc, as CallServer does: one thread takes what happens to all calls of a connection, and hands
each message to the client's call. The event loop hears of the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

import grpc
from grpc import aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from server.event_thread import Event, Rests, start_event_thread

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]
_Part = TypeVar("_Part")  # of an answer: what comes first, or a message

_NO_FLAGS = 0
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CANCELLED = grpc.StatusCode.CANCELLED.value[0]


class Client(Protocol):
    """Takes what a worker sends, in any thread; ServerCall says how."""

    def pass_metadata(self, metadata: Metadata, passed: Callable[[bool], object]) -> None:
        """Take what comes first."""

    def pass_message(self, message: bytes, passed: Callable[[bool], object]) -> None:
        """Take a message."""


class WorkerFailed(Exception):
    """A call has ended at the worker, or on the way to it, with another status than OK."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata) -> None:
        super().__init__(code, details)
        self.code, self.details, self.trailing_metadata = code, details, trailing_metadata


class WorkerCalls:
    """A connection to one worker, there from the first call on."""

    def __init__(
        self,
        address: str,
        options: Iterable[tuple[str, int | str]],
        credentials: grpc.ChannelCredentials | None = None,
        rests: Rests | None = None,
    ) -> None:
        """Encrypt what is sent if there are credentials.

        What comes waits where `rests` are wanted.
        """
        inner = None if credentials is None else cast(Any, credentials)._credentials
        self._channel = cygrpc.Channel(address.encode(), tuple(options), inner)
        self._open: set[WorkerCall] = set()
        self._is_closing = False
        next_event = self._channel.next_call_event
        start_event_thread(f"calls to {address}", next_event, self._passed_on, rests or Rests())

    def make(self) -> WorkerCall:
        """Return a call that is to be started."""
        return WorkerCall(self._channel, self._open)

    def close(self) -> None:
        """End all calls; the connection closes behind the last of them."""
        if self._is_closing:
            return
        self._is_closing = True
        for call in tuple(self._open):
            call.cancel()
        last = self.make()  # its end wakes the thread
        last.start("/", b"", (), 0.0, None)
        last.cancel()

    def _passed_on(self, event: Event) -> bool:
        """Pass on what happened to a call, in the thread; return whether more may come."""
        try:
            if event.tag is not None:
                event.tag(event)
        except Exception:
            logger.exception("what a worker has sent was not passed on")
        if self._open or not self._is_closing:
            return True
        self._channel.close(_CANCELLED, "the connection is closed")
        return False


class WorkerCall:
    """One call to a worker; it is started once, on the event loop."""

    def __init__(self, channel: Any, open_calls: set[WorkerCall]) -> None:
        self.is_committed = False  # something of the answer has come
        self.initial_metadata: Metadata = ()
        self.response: bytes | None = None  # of a call that passes nothing on
        self._channel = channel
        self._open_calls = open_calls
        self._client: Client | None = None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Metadata] = self._loop.create_future()
        self._lock = threading.RLock()  # of all below
        self._is_over = False  # here: nothing more is passed on
        self._num_due = 0  # events that are to come
        self._is_passing = False
        self._next: bytes | None = None  # waits until the one before it has gone
        self._status: Any = None

    def start(
        self,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
        client: Client | None,
    ) -> None:
        """Send the request; hand the answer to a client as it comes, or keep the one message."""
        self._client = client
        sending = (
            cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),
            cygrpc.SendMessageOperation(request, _NO_FLAGS),
            cygrpc.SendCloseFromClientOperation(_NO_FLAGS),
            cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),
        )
        beginning = (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),)
        deadline = None if timeout is None else time.time() + timeout
        with self._lock:
            self._open_calls.add(self)
            self._num_due = 2
            self._call = self._channel.integrated_call(
                _NO_FLAGS,
                method.encode(),
                None,
                deadline,
                (),
                None,
                ((sending, self._has_ended), (beginning, self._has_begun)),
            )

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
        self._call.cancel(_CANCELLED, "the call was cancelled")
        self._end.cancel()

    # In the threads of the worker's connection and of the client's server.

    def _has_begun(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self.initial_metadata = _pairs(event.batch_operations[0].initial_metadata())
            if self._client is not None and self.initial_metadata and not self._is_over:
                self.is_committed = True
                self._pass(self._client.pass_metadata, self.initial_metadata)
            self._read()
            self._settle()

    def _has_come(self, event: Event) -> None:
        message = event.batch_operations[0].message()
        with self._lock:
            self._num_due -= 1
            if message is not None and not self._is_over:
                self.is_committed = True
                if self._client is None:
                    self.response = message
                elif self._is_passing:
                    self._next = message
                else:
                    self._pass(self._client.pass_message, message)
                    self._read()
            self._settle()

    def _has_passed(self, is_there: bool) -> None:
        with self._lock:
            self._is_passing = False
            message, self._next = self._next, None
            if not is_there:
                self._is_over = True
                self._tell(aio.InternalError("the client is gone"))
            elif message is not None and self._client is not None and not self._is_over:
                self._pass(self._client.pass_message, message)
                self._read()
            self._settle()

    def _pass(
        self, pass_on: Callable[[_Part, Callable[[bool], object]], None], part: _Part
    ) -> None:
        """Hand something to the client; if it fails at that, the call ends with its error.

        The next message is asked for behind it, most often by the thread that takes messages; the
        other would wait for it.
        """
        self._is_passing = True
        try:
            pass_on(part, self._has_passed)
        except Exception as error:
            self._is_over, self._is_passing = True, False
            self._tell(error)
            raise

    def _has_ended(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._status = event.batch_operations[-1]
            self._settle()

    def _read(self) -> None:
        """Ask for the next message: gRPC tells of the end once there is none."""
        if not self._is_over and self._status is None:
            operation = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
            self._num_due += bool(self._call.operate(operation, self._has_come))

    def _settle(self) -> None:
        """Tell of the end once everything that came before it has gone."""
        if self._status is None or self._num_due or self._is_passing:
            return
        self._open_calls.discard(self)
        code = _CODES.get(self._status.code(), grpc.StatusCode.UNKNOWN)
        trailing = _pairs(self._status.trailing_metadata())
        if code is grpc.StatusCode.OK:
            self._tell(trailing)
        else:
            self._tell(WorkerFailed(code, self._status.details() or "", trailing))

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


def _pairs(metadata: Any) -> Metadata:
    return tuple((key, value) for key, value in metadata or ())
