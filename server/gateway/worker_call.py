"""One call to a worker: its answer goes to the client in order, no faster than that takes it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import grpc
from grpc import aio

from server.lane import Metadata

_Part = TypeVar("_Part")  # of an answer: what comes first, or a message

_CODES = {code.value[0]: code for code in grpc.StatusCode}


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


class Status(NamedTuple):
    """How a call has ended at the worker."""

    code: int
    details: str
    trailing_metadata: Metadata


class WorkerCall(ABC):
    """A call that was started on the event loop; how its messages come is told by a subclass.

    What begins with an underscore runs in threads of the worker's connection and of the client's
    server. Only `end` and `cancel` are for others.
    """

    def __init__(self, client: Client | None) -> None:
        """Hand the answer to a client as it comes, or keep the one message of it."""
        self.is_committed = False  # something of the answer has come
        self.initial_metadata: Metadata = ()
        self.response: bytes | None = None  # of a call that passes nothing on
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Metadata] = self._loop.create_future()
        self._lock = threading.RLock()  # of all below
        self._is_over = False  # here: nothing more is passed on
        self._is_passing = False
        self._waiting: deque[bytes] = deque()  # until the one before them has gone
        self._status: Status | None = None

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
        self._cancel_there()
        self._end.cancel()

    @abstractmethod
    def _cancel_there(self) -> None:
        """Tell the worker, if the call has not ended."""

    @abstractmethod
    def _ask_for_more(self, behind: bytes) -> None:
        """Let the worker send another message behind this one, which was handed to the client."""

    @property
    @abstractmethod
    def _is_due(self) -> bool:
        """Whether something comes from the worker before the call has ended."""

    @abstractmethod
    def _leave(self) -> None:
        """Be no more among the open calls."""

    def _take_metadata(self, metadata: Metadata) -> None:
        self.initial_metadata = metadata
        if self._client is not None and metadata and not self._is_over:
            self.is_committed = True
            self._pass(self._client.pass_metadata, metadata)

    def _take(self, message: bytes) -> None:
        if self._is_over:
            return
        self.is_committed = True
        if self._client is None:
            self.response = message
        elif self._is_passing:
            self._waiting.append(message)
        else:
            self._pass(self._client.pass_message, message)
            self._ask_for_more(message)

    def _has_passed(self, is_there: bool) -> None:
        with self._lock:
            self._is_passing = False
            if not is_there:
                self._is_over = True
                self._tell(aio.InternalError("the client is gone"))
            if self._is_over:
                self._waiting.clear()
            elif self._waiting and self._client is not None:
                message = self._waiting.popleft()
                self._pass(self._client.pass_message, message)
                self._ask_for_more(message)
            self._settle()

    def _pass(
        self, pass_on: Callable[[_Part, Callable[[bool], object]], None], part: _Part
    ) -> None:
        """Hand something to the client; if it fails at that, the call ends with its error.

        Another message is asked for behind it, most often by the thread that takes messages; the
        other would wait for it.
        """
        self._is_passing = True
        try:
            pass_on(part, self._has_passed)
        except Exception as error:
            self._is_over, self._is_passing = True, False
            self._tell(error)
            raise

    def _settle(self) -> None:
        """Tell of the end once everything that came before it has gone."""
        if self._status is None or self._is_due or self._is_passing:
            return
        self._leave()
        code = _CODES.get(self._status.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            self._tell(self._status.trailing_metadata)
        else:
            self._tell(WorkerFailed(code, self._status.details, self._status.trailing_metadata))

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
