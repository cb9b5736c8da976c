"""Relays the bytes of one call to a worker, and to another one while that may help.

A call is committed to a worker by the first thing that comes back: the answer of a unary call,
the initial metadata of a stream, which a worker sends on admission. Until then another worker is
asked when one is lost, stops or is full. Afterwards a worker of the same origin goes on with a
stream, behind what its client has; where none is there, or the stream cannot be resumed, a lost
worker ends the call, and the client may ask again. A request that has crashed too many ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
from grpc import aio

from engine.errors import ReplicaLost, TokenweirError
from server.auth.tokens import METADATA_KEY
from server.calls.call_server import ServerCall
from server.calls.status import CallStatus, call_status
from server.gateway.backend import Backend
from server.gateway.book import Book, CallRecord
from server.gateway.losses import HasCrashed, Losses
from server.gateway.pool import Attempts, CallFailed, Pool
from server.gateway.request_head import NO_HEAD, RequestHead
from server.gateway.resume.resumable import ResumableStream
from server.telemetry.tracing import traceparent_in
from server.wire.protocol import Metadata
from server.wire.work_pb2 import Record
from server.wire.worker_call import WorkerCall, WorkerFailed

logger = logging.getLogger(__name__)

_RETRY_AFTER = 0.5  # seconds
_OWN = frozenset({"user-agent", METADATA_KEY})
_CANCELLED = grpc.StatusCode.CANCELLED.name
# Statuses after which another worker may do better.
_ELSEWHERE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})  # if nobody says more


class Relay:
    """Hands calls on to the workers of a pool."""

    def __init__(
        self,
        pool: Pool,
        worker_wait: float,
        num_waiting: Callable[[], int],
        book: Book,
        has_crashed: HasCrashed = lambda address: None,
    ) -> None:
        """Calls wait `worker_wait` seconds for a worker; workers are told how many wait here.

        `has_crashed` is that of Losses.
        """
        self._pool = pool
        self._book = book
        self._worker_wait = worker_wait
        self._num_waiting = num_waiting
        self._losses = Losses(has_crashed)
        self._calls: set[WorkerCall] = set()  # under way at the workers
        self._refusal: TokenweirError | None = None  # why they are ended from here

    def end_calls(self, error: TokenweirError) -> None:
        """End every call that is under way at a worker with this error.

        It cancels the call there, not the task here: that could be in the middle of a write, and
        then gRPC takes no status.
        """
        self._refusal = error
        for call in tuple(self._calls):
            call.cancel()

    async def wait_for_worker(self) -> None:
        """Return once any worker serves; raises as `unary`."""
        await self._pool.choose(self._attempts("", b"", NO_HEAD))

    async def unary(
        self, method: str, request: bytes, context: ServerCall, head: RequestHead = NO_HEAD
    ) -> bytes:
        """Return the answer of a call that has one; CallFailed with how it ends otherwise."""
        attempts = self._attempts(method, request, head)
        while True:
            backend = await self._pool.choose(attempts)
            try:
                call, trailing = await self._answer(request, None, backend, attempts, context)
            except WorkerFailed as error:
                _retry_or_raise(attempts, backend, error)
                continue
            if call.initial_metadata:
                await context.send_initial_metadata(call.initial_metadata)
            context.set_trailing_metadata(trailing)
            assert call.response is not None, "without one its status is not OK"
            return call.response

    async def stream(
        self, method: str, request: bytes, context: ServerCall, head: RequestHead = NO_HEAD
    ) -> None:
        """Write all messages of an answer; raises as `unary`.

        The client of a resumed one has its beginning from another call.
        """
        attempts = self._attempts(method, request, head)
        stream = ResumableStream(context, request)
        if head.is_resumed:
            stream.resume()
        while True:
            backend = await self._pool.choose(attempts)
            try:
                await self._answer(stream.request, stream, backend, attempts, context)
                return
            except WorkerFailed as error:
                if stream.is_complete:
                    return
                if not stream.has_begun:
                    _retry_or_raise(attempts, backend, error)
                    continue
                _go_on_or_raise(attempts, stream, backend, error)
                self._book.counts.count("gateway_resumed_streams")
            except aio.InternalError:
                if not stream.was_refused:
                    raise
                _look_elsewhere_or_raise(attempts, stream, backend)
            await context.wait_until_sent()
            stream.begin_again()

    async def _answer(
        self,
        request: bytes,
        client: ResumableStream | None,
        backend: Backend,
        attempts: Attempts,
        context: ServerCall,
    ) -> tuple[WorkerCall, Metadata]:
        """Relay a call to its end; return the call and the trailing metadata.

        `end_calls` may end it. The worker is told how many calls wait here for each.
        """
        metadata = tuple(
            (key, value)
            for key, value in context.invocation_metadata()
            if key not in _OWN and not key.startswith("grpc-")  # those are of the connection
        )
        num_waiting = -(-self._num_waiting() // max(1, len(self._pool.serving)))
        started = time.monotonic()
        call = backend.carrier.start(
            attempts.method,
            request,
            metadata,
            context.time_remaining(),
            client,
            num_waiting=num_waiting,
            request_id=attempts.request_id,
        )
        context.is_relayed = True
        attempts.begin(backend)
        self._calls.add(call)
        backend.has(call)
        try:
            return call, await call.end()
        except BaseException as error:
            call.cancel()  # does nothing if it has ended there
            if isinstance(error, asyncio.CancelledError):  # or else by the client, which has gone
                backend.raise_if_lost()
                if self._refusal is not None:
                    raise self._refusal from None
            raise
        finally:
            backend.has_no_more(call)
            self._calls.discard(call)
            self._enter(call, backend, attempts, context, started)

    def _enter(
        self,
        call: WorkerCall,
        backend: Backend,
        attempts: Attempts,
        context: ServerCall,
        started: float,
    ) -> None:
        """Enter a call into the book, unless its worker was lost."""
        head, status = attempts.head, call.status
        if status is None and not backend.is_lost:
            has_model = any(one.model == head.model for one in backend.models)
            told = Record(
                request_id=attempts.request_id,
                model=head.model if has_model else "",
                seconds=time.monotonic() - started,
            )
            code = _CANCELLED
        elif status is not None and status.record is not None:
            told, code = status.record, status.code.name
        else:
            return
        traceparent = traceparent_in(context.invocation_metadata())
        waited, ended = started - context.arrived, time.time()
        called = attempts.method, backend.address, head.tenant
        self._book.enter(CallRecord(*called, waited, ended, code, told, traceparent))

    def _attempts(self, method: str, request: bytes, head: RequestHead) -> Attempts:
        return Attempts(method, request, self._worker_wait, self._losses, head)


def _retry_or_raise(attempts: Attempts, backend: Backend, error: WorkerFailed) -> None:
    """Remember the failure if another worker may do better, else raise CallFailed."""
    status = _status(error, attempts.request_id)
    if status.code not in _ELSEWHERE:
        raise CallFailed(status) from error
    logger.info("worker %s did not take a call: %s", backend.address, status.message)
    is_lost = status.reason == ReplicaLost.reason
    if is_lost:
        attempts.lost(backend, error.crashed)
    attempts.go_on(backend, status, anew=is_lost)


def _go_on_or_raise(
    attempts: Attempts, stream: ResumableStream, backend: Backend, error: WorkerFailed
) -> None:
    """Resume a stream that has begun at another worker, else raise how it ends.

    That is ReplicasLost if it would end the next worker, too.
    """
    status = _status(error, attempts.request_id)
    is_lost = status.reason == ReplicaLost.reason
    if is_lost:
        attempts.lost(backend, error.crashed)
        attempts.refuse_poison()
    if not stream.can_go_on or status.code not in _ELSEWHERE:
        raise CallFailed(status) from error
    logger.info("a stream of worker %s goes on at another: %s", backend.address, status.message)
    attempts.go_on(
        backend,
        status if is_lost else _lost(attempts.request_id),
        anew=is_lost or stream.is_answered,
    )


def _look_elsewhere_or_raise(attempts: Attempts, stream: ResumableStream, backend: Backend) -> None:
    """Resume a stream at a worker of the same origin; raise if this one was, and differed."""
    status = _lost(attempts.request_id)
    if stream.difference:
        logger.error(
            "worker %s answers a request otherwise than the worker before it, from what should "
            "give the same: %s",
            backend.address,
            stream.difference,
        )
        raise CallFailed(status)
    attempts.exclude(backend, status)


def _status(error: WorkerFailed, request_id: str) -> CallStatus:
    """Return the worker's own words, or ReplicaLost if it can no longer speak."""
    is_lost = error.status.code in _LOST and not error.is_workers_own
    return _lost(request_id) if is_lost else error.status


def _lost(request_id: str) -> CallStatus:
    lost = ReplicaLost(
        "the replica that ran the request is gone; ask again, with the same request id",
        _RETRY_AFTER,
    )
    return call_status(lost, request_id)
