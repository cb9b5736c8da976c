"""A gRPC server whose calls cost little until somebody answers them.

grpc.aio makes three tasks of every call and wakes its event loop five times, also for one that is
refused at once: under overload that is most of what a gateway does. This server stands on its core,
as grpc.server does. One thread takes what has happened; the event loop hears of a call once there
is its message, and then of what an answer waits for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NoReturn, Self, TypeVar, cast

import grpc
from grpc import aio

from engine.errors import Draining
from server.calls import grpc_core as core
from server.calls.event_thread import BackOff, start_event_thread
from server.calls.grpc_core import Event, Pairs
from server.calls.status import CallStatus, call_status

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FAILED = "the server failed; see its log"
_STOPPING = "this server is stopping; ask again"
_RETRY_AFTER = 0.5  # seconds
_ASKED_FOR = 100  # calls that gRPC may tell of before the thread has taken the first
_MOST_PENDING = 1000  # calls that have come and that gRPC has not told of
_CLOSE_TIMEOUT = 0.5  # seconds in which calls that are ended here tell their clients
_QUIET, _MOST_QUIET = 0.1, 10  # seconds without a new call, and how often they are waited for
_NO_DEADLINE = 1e11  # seconds since 1970; where there is none, gRPC gives the end of time
_ARRIVAL, _STOPPED = object(), object()  # tags of what is not an answer to a call


class CallServer:
    """Tells `arrived` of every call, in a thread of its own."""

    def __init__(
        self,
        arrived: Callable[[ServerCall], object],
        options: Iterable[tuple[str, int]],
        back_off: BackOff | None = None,
    ) -> None:
        """`back_off` makes the server take several calls at a time."""
        self._arrived = arrived
        self._back_off = back_off or BackOff()
        self._loop = asyncio.get_running_loop()
        self._queue = core.CompletionQueue()
        self._server = core.Server(tuple(options), False)
        self._server.register_completion_queue(self._queue)
        self._lock = threading.Lock()  # a server that stops takes no request for the next call
        self._open: set[ServerCall] = set()
        self._num_arrived = 0  # calls, ever
        self._is_stopping = False
        self._stopped = asyncio.Event()

    def add_insecure_port(self, address: str) -> int:
        """Listen; return the port. Raises RuntimeError if nobody can listen there."""
        return self._listening(address, self._server.add_http2_port(address.encode()))

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int:
        """Listen for encrypted connections only; return as `add_insecure_port`."""
        port = self._server.add_http2_port(address.encode(), core.inner(credentials))
        return self._listening(address, port)

    def _listening(self, address: str, port: int) -> int:
        if not port:
            raise RuntimeError(f"cannot listen on {address}")
        return port

    def start(self) -> None:
        """Take calls from now on."""
        self._server.start()
        for _ in range(_ASKED_FOR):
            self._ask_for_next()
        start_event_thread(self._queue.poll, self._pass_on, self._back_off)

    async def wait_until_quiet(self) -> None:
        """Return when no call has come for a moment; not later than after a second of calls.

        Clients usually send the next request right after an answer. A call that is refused goes
        elsewhere; one that meets a server as it stops is cancelled by gRPC without a word.
        """
        for _ in range(_MOST_QUIET):
            before = self._num_arrived
            await asyncio.sleep(_QUIET)
            if self._num_arrived == before:
                return

    async def stop(self, grace: float) -> None:
        """Take no more calls, and end those that go on after `grace` seconds, with UNAVAILABLE.

        gRPC cancels without a word what it has not told of before, so that is asked for first.
        """
        for _ in range(_MOST_PENDING):
            self._ask_for_next()
        with self._lock:
            self._is_stopping = True
            self._server.shutdown(self._queue, _STOPPED)
        if not await self._has_stopped(grace):
            for call in tuple(self._open):
                call.end()
            if not await self._has_stopped(_CLOSE_TIMEOUT):
                self._server.cancel_all_calls()
                await self._stopped.wait()
        self._server.destroy()

    async def _has_stopped(self, seconds: float) -> bool:
        """Wait so long for the last call and connection to end; return whether they have."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        return self._stopped.is_set()

    def _ask_for_next(self) -> None:
        with self._lock:
            if not self._is_stopping:
                self._server.request_call(self._queue, self._queue, _ARRIVAL)

    def _pass_on(self, event: Event) -> bool:
        """Pass on what has happened; return whether more may come."""
        try:
            if event.tag is _STOPPED:
                self._loop.call_soon_threadsafe(self._stopped.set)
            elif event.tag is not _ARRIVAL:
                event.tag(event)
            elif event.success:
                self._num_arrived += 1
                self._ask_for_next()
                call = ServerCall(event, self._loop, self._open)
                call.try_to(lambda: self._arrived(call))
        except Exception:  # all other calls need the thread
            if not self._loop.is_closed():
                logger.exception("an event of gRPC was lost")
        return event.tag is not _STOPPED


class AnsweredCall(ABC):
    """A call that is answered by a task, which takes it for an `aio.ServicerContext`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, method: str, metadata: Pairs) -> None:
        self.method = method
        self.response_serializer: Callable[[Any], bytes] | None = None
        self._loop = loop
        self._metadata = metadata
        self._task: asyncio.Task[None] | None = None
        self._trailing_metadata: Pairs = ()
        self._has_ended = False

    def invocation_metadata(self) -> Pairs:
        """Return what the client sent besides its message."""
        return self._metadata

    def set_trailing_metadata(self, metadata: Pairs) -> None:
        """Send this at the end of a call that succeeds."""
        self._trailing_metadata = metadata

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call this when the answer has ended, well or not."""
        assert self._task is not None, "it is answered"
        self._task.add_done_callback(lambda _: callback(self))

    def _begin(self, answer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._task = self._loop.create_task(self._run(answer))
        self._task.add_done_callback(lambda _: answer.close())  # cancelled, it may not have begun
        return self._task

    async def _run(self, answer: Awaitable[None]) -> None:
        try:
            await answer
        except asyncio.CancelledError:
            logger.debug("%s was cancelled", self.method)
        except aio.BaseError:  # it was aborted, or the client is gone
            pass
        except Exception:
            logger.exception("%s failed", self.method)
            self._end_with(CallStatus(grpc.StatusCode.UNKNOWN, _FAILED, ()))
        finally:
            self._give_up()

    @abstractmethod
    def _end_with(self, status: CallStatus) -> None:
        """Send the end of the call, unless it has ended."""

    @abstractmethod
    def _give_up(self) -> None:
        """End the call without a word, unless it has ended."""

    def _serialized(self, message: Any) -> bytes:
        return self.response_serializer(message) if self.response_serializer else message


class ServerCall(AnsweredCall):
    """One call of a server: refused, or answered."""

    def __init__(
        self, event: Event, loop: asyncio.AbstractEventLoop, open_calls: set[ServerCall]
    ) -> None:
        """A call is among the open ones until it has ended."""
        super().__init__(loop, event.call_details.method.decode(), event.invocation_metadata)
        self._peer: bytes = event.call.peer()
        self.arrived = time.monotonic()
        self.last_message = b""  # the last that was sent
        self.code: grpc.StatusCode | None = None  # it ended with; None: its client has gone away
        self.is_relayed = False  # to another server, which tells what becomes of it
        self._call = event.call
        self._deadline: float = event.call_details.deadline
        self._has_begun = False  # to answer
        self._is_sending = self._has_failed = False  # the last write
        self._passed: Callable[[bool], object] | None = None  # tells that what was passed has gone
        self._sent: asyncio.Future[None] | None = None  # awaited until it is sent
        self._before_end: list[Callable[[], object]] = []
        self._open_calls = open_calls
        open_calls.add(self)

    def peer(self) -> bytes:
        """Return the address of the client."""
        return self._peer

    def certified_name(self) -> str | None:
        """Return what the client's certificate calls it, "" for no name; None without one."""
        found = core.auth_context(self._call) or {}
        if b"x509_pem_cert" not in found:
            return None
        keys = (b"x509_common_name", b"x509_subject_alternative_name")
        names = [name for key in keys for name in found.get(key, ())]
        return cast(str, names[0].decode(errors="replace")) if names else ""

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        if self._deadline > _NO_DEADLINE:
            return None
        return max(0.0, self._deadline - time.time())

    def replace_metadata(self, key: str, value: str) -> None:
        """Replace a value in the metadata of the client."""
        others = ((name, one) for name, one in self._metadata if name != key)
        self._metadata = (*others, (key, value))

    def receive(self, received: Callable[[bytes | None], object]) -> None:
        """Read the next message, None at the end of them; call `received` in the thread."""
        self._call.start_server_batch(
            (core.receive_message(),),
            lambda event: self.try_to(lambda: received(event.batch_operations[0].message())),
        )

    def try_to(self, take_in: Callable[[], object]) -> None:
        """Do something with a call that nobody answers yet; it ends if that fails."""
        try:
            take_in()
        except Exception:
            if self._loop.is_closed():
                return
            logger.exception("%s failed", self.method)
            if self._task is None and not self._has_ended:
                self.refuse(CallStatus(grpc.StatusCode.UNKNOWN, _FAILED, ()))

    def refuse(self, status: CallStatus) -> None:
        """End a call that nobody answers; nothing if it has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        self._open_calls.discard(self)
        watch = core.receive_close()
        self._call.start_server_batch((*self._ending(status), watch), _nothing_to_do)

    def end(self) -> None:
        """End the call because the server stops: with a reason, if its answer has not begun."""
        if self._has_begun:  # a status would wait behind what is not read
            self._call.cancel(grpc.StatusCode.UNAVAILABLE.value[0], _STOPPING)
        elif not self._has_ended:
            stopping = Draining(_STOPPING, _RETRY_AFTER)
            self._end_with(call_status(stopping, ""))  # the client knows its id
            if self._task is not None:
                self._task.cancel()

    def answer(self, answer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Answer the call by a coroutine; it is cancelled if the client goes away."""
        task = self._begin(answer)
        task.add_done_callback(lambda _: self._ends())
        self._call.start_server_batch((core.receive_close(),), self._closed)
        return task

    def before_end(self, count: Callable[[], object]) -> None:
        """Call this once, before the client can know that the call has ended: it may ask again.

        That is in any thread, with `last_message` and `code` as they will be.
        """
        self._before_end.append(count)

    async def read(self) -> Any:
        """Return the next message; aio.EOF at the end of them."""
        message: asyncio.Future[bytes | None] = self._loop.create_future()
        self.receive(lambda data: self._loop.call_soon_threadsafe(_resolve, message, data))
        data = await message
        return aio.EOF if data is None else data

    async def send_initial_metadata(self, metadata: Pairs) -> None:
        """Begin to answer, before there is a message."""
        self._has_begun = True
        await self._send(core.send_metadata(tuple(metadata)))

    async def write(self, message: Any) -> None:
        """Send a message."""
        await self._send(*self._beginning(), self._sending(message))

    def pass_metadata(self, metadata: Pairs, passed: Callable[[bool], object]) -> None:
        """Begin to answer, see `pass_message`; a message need not wait until this has gone."""
        self._has_begun = True
        operation = core.send_metadata(tuple(metadata))
        passed(not self._call.start_server_batch((operation,), _nothing_to_do))

    def pass_message(
        self, message: bytes, passed: Callable[[bool], object], *, is_followed: bool = False
    ) -> None:
        """Send a message from any thread; call `passed` with whether it has gone.

        That is before the next one, in the thread of the server, or at once if the client is gone.
        One that is followed at once may wait for what comes behind it.
        """
        may_wait = is_followed and self._has_begun  # gRPC tells of metadata only once it has gone
        self._pass((*self._beginning(), self._sending(message, may_wait=may_wait)), passed)

    def pass_end(self, message: bytes | None, trailing_metadata: Pairs) -> bool:
        """End the call with success from any thread, once what was passed before has gone.

        Return whether the client is there.
        """
        last = () if message is None else (self._sending(message),)
        operations = (*self._beginning(), *last, _success(trailing_metadata))
        self._has_ended, self.code = True, grpc.StatusCode.OK
        self._ends()
        self._is_sending = True
        if self._has_failed or self._call.start_server_batch(operations, self._has_gone):
            self.code = None
        return self.code is not None

    async def wait_until_sent(self) -> None:
        """Return when all that was written or passed on has gone."""
        if self._is_sending:
            self._sent = self._loop.create_future()  # first, then look: the thread does the reverse
            if self._is_sending:
                await self._sent
            self._sent = None

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Pairs = ()
    ) -> NoReturn:
        """End the call with an error; raises aio.AbortError, for then there is nothing to do."""
        self._has_ended, self.code = True, code
        self._ends()
        status = CallStatus(code, details, tuple(trailing_metadata))
        await self._send(*self._ending(status))
        raise aio.AbortError("the call was aborted")

    async def finish(self, response: Any = None) -> None:
        """End the call with success, nothing if it has ended.

        `response` is the one message of a unary call.
        """
        if self._has_ended:
            return
        beginning = self._beginning()
        last = () if response is None else (self._sending(response),)
        self._has_ended, self.code = True, grpc.StatusCode.OK
        self._ends()
        await self._send(*beginning, *last, _success(self._trailing_metadata))

    def _end_with(self, status: CallStatus) -> None:
        if not self._has_ended:
            self._has_ended, self.code = True, status.code
            self._ends()
            self._call.start_server_batch(self._ending(status), _nothing_to_do)

    def _give_up(self) -> None:
        if not self._has_ended:
            self._call.cancel()

    def _ends(self) -> None:
        while self._before_end:
            with suppress(IndexError):  # another thread has taken the last one
                self._before_end.pop()()

    def _closed(self, event: Event) -> None:
        """In the thread: the client has gone away, or has all that it waited for."""
        self._open_calls.discard(self)
        if event.batch_operations[0].cancelled():
            self._loop.call_soon_threadsafe(self._client_is_gone)

    def _client_is_gone(self) -> None:
        if self._task is not None and not self._has_ended:
            self._task.cancel()

    async def _send(self, *operations: Any) -> None:
        """Send something once what was before it has gone; most often that is so already.

        Raises aio.InternalError if the client is gone, which may show at what comes next only.
        """
        await self.wait_until_sent()
        self._is_sending = True
        if self._has_failed or self._call.start_server_batch(operations, self._has_gone):
            raise aio.InternalError("the client is gone")

    def _pass(self, operations: tuple[Any, ...], passed: Callable[[bool], object]) -> None:
        self._is_sending, self._passed = True, passed
        if self._has_failed or self._call.start_server_batch(operations, self._has_passed):
            self._is_sending, self._passed = False, None
            passed(False)

    def _has_passed(self, event: Event) -> None:
        passed, self._passed = self._passed, None  # first: something else may be passed on then
        self._has_gone(event)
        assert passed is not None, "it is told once"
        passed(event.success)

    def _has_gone(self, event: Event) -> None:
        """In the thread: what was sent has gone, or nothing can be sent any more."""
        self._has_failed = not event.success
        self._is_sending = False
        if (sent := self._sent) is not None:
            self._loop.call_soon_threadsafe(_resolve, sent, None)

    def _beginning(self) -> tuple[Any, ...]:
        if self._has_begun:
            return ()
        self._has_begun = True
        return (core.send_metadata(None),)

    def _sending(self, message: Any, *, may_wait: bool = False) -> Any:
        self.last_message = self._serialized(message)
        return core.send_message(self.last_message, may_wait=may_wait)

    def _ending(self, status: CallStatus) -> tuple[Any, ...]:
        return (*self._beginning(), _status(status))


def _success(trailing_metadata: Pairs) -> Any:
    return _status(CallStatus(grpc.StatusCode.OK, "", tuple(trailing_metadata)))


def _status(status: CallStatus) -> Any:
    return core.send_status(status.trailing_metadata, status.code, status.message)


def _resolve(outcome: asyncio.Future[_T], result: _T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _nothing_to_do(event: Event) -> None:
    pass
