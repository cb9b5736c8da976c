"""The public port: relays the bytes of every call to a worker.

A call is committed to a worker by the first thing that comes back: the answer of a unary call,
the initial metadata of a stream, which a worker sends on admission. Until then the gateway asks
another worker when one is lost, stops or is full. Afterwards a lost worker ends the call, and
the client may ask again, until the same request has lost too many.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from tokenweir.v1 import admin_service_pb2

from engine.background import in_background
from engine.errors import Draining, QueueFull, ReplicaLost, TokenweirError
from server.api import HEALTH, METHODS, SERVICES, WAITING_KEY
from server.call_wall import CallWall, RequestReader
from server.config import GatewayConfig
from server.gateway.admission import Admission
from server.gateway.backend import Backend, WorkerLost
from server.gateway.call_server import CallServer, ServerCall
from server.gateway.local_services import LocalServices
from server.gateway.losses import Losses
from server.gateway.pool import Attempts, CallFailed, Pool
from server.gateway.share import Share, share_of
from server.health import Health
from server.interceptors import ParsingInterceptor, StatusInterceptor, StreamParsingInterceptor
from server.last_moment import LAST_WORDS, abort, in_time
from server.listening import listen, max_message_bytes, server_options
from server.reflection import enable_reflection
from server.request_ids import is_request_id, made_request_id, request_id_in
from server.status import DETAILS_KEY, CallStatus, call_status

Metadata = tuple[tuple[str, str | bytes], ...]

logger = logging.getLogger(__name__)

_PACKAGE = "/tokenweir.v1."
_ADMIN = f"{_PACKAGE}AdminService/"
_GET_LOAD = f"{_ADMIN}GetLoad"
_GET_LOAD_TIMEOUT = 2.0  # seconds; a worker that is slower is left out
_RETRY_AFTER = 0.5  # seconds
_DEADLINE_MARGIN = 0.01  # seconds; less than a worker's, whose words say more
_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})  # if nobody says more
_UNARY = frozenset(path for path, method in METHODS.items() if not method.server_streaming)


class Gateway:
    """One port before many workers."""

    def __init__(
        self, config: GatewayConfig, lost: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        """Call `lost` with the address of a worker that `sync` left out and that hangs."""
        self._config = config
        self._pool = Pool(
            self._publish_health, lost or _nothing_to_do, silence=config.worker_silence
        )
        self._losses = Losses()
        self._health = Health()
        self._wall = CallWall(config.max_concurrent_calls, config.max_open_bytes)
        self._reader = RequestReader(
            max_bytes=config.max_open_bytes,
            max_message_bytes=max_message_bytes(config.max_request_bytes),
        )
        self._admission = Admission()
        self._calls: set[asyncio.Task[Any]] = set()
        self._upstream_calls: set[aio.Call] = set()
        self._draining = False
        self._closing = False
        self._models: set[str] = set()  # ever seen: their health must turn when they go

    async def start(self) -> int:
        """Listen; return the port. Raises ConfigError if nobody can listen there."""
        self._loop = asyncio.get_running_loop()
        max_bytes = self._config.max_request_bytes
        self._local = LocalServices(
            (StatusInterceptor(), ParsingInterceptor(max_bytes), StreamParsingInterceptor())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._local)
        enable_reflection((*SERVICES, HEALTH), self._local)
        self._server = CallServer(
            self._arrived, server_options(max_bytes, self._config.client_silence)
        )
        port = listen(self._server, self._config.host, self._config.port)
        self._publish_health()
        self._server.start()
        self._late = in_background("watching for requests", self._reader.end_late_ones)
        return port

    async def sync(self, workers: Sequence[str]) -> None:
        """Send new calls to these workers only, "host:port" each.

        Running calls go on at the others, unless one does not answer: then they end, or go to
        another worker if that did not show yet.
        """
        await self._pool.sync(workers)

    @property
    def num_serving(self) -> int:
        """The number of workers that take calls now."""
        return len(self._pool.serving)

    async def drain(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end within `grace` seconds."""
        self._health.go_down()
        self._draining = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)

    async def close(self) -> None:
        """End everything; an open server or channel would keep the interpreter from exiting."""
        await self.drain(0)
        self._closing = True
        self._admission.refuse_waiting(_draining())
        await self._pool.refuse_waiting(_draining())
        for call in tuple(self._upstream_calls):
            call.cancel()
        self._health.close()
        self._late.cancel()
        await self._server.stop(LAST_WORDS)
        await self._pool.close()

    def _publish_health(self) -> None:
        serving = self._pool.serving
        most, crowded = self._config.max_calls_per_worker, self._config.crowded_calls_per_worker
        self._admission.set_places(len(serving) * most or None, len(serving) * crowded)
        ready = {name for backend in serving for name in backend.models}
        self._models |= ready
        for name in ("", *SERVICES):
            self._health.publish(name, serving=bool(serving))
        for name in self._models:
            self._health.publish(name, serving=name in ready)

    def _arrived(self, call: ServerCall) -> None:
        """In the thread of the server: read the request, if there is room for one more.

        Health and reflection always have it.
        """
        if not call.method.startswith(_PACKAGE):
            self._loop.call_soon_threadsafe(self._answer_locally, call)
            return
        try:
            self._wall.enter()
        except QueueFull as error:
            call.refuse(call_status(error, made_request_id()))
            return
        self._reader.read(call, lambda request: self._has_come(call, request))

    def _answer_locally(self, call: ServerCall) -> None:
        call.answer(self._local.answer(call))

    def _has_come(self, call: ServerCall, request: bytes | TokenweirError) -> None:
        """In any thread: let a call be answered, or refuse it at once.

        Under overload nothing may cost less, and to wake the event loop is a quarter of it.
        """
        share = None
        try:
            if isinstance(request, TokenweirError):
                raise request
            share = None if call.method.startswith(_ADMIN) else share_of(call.method, request)
            if share is not None and not self._draining:
                self._admission.refuse_if_too_late(share, call.time_remaining())
        except TokenweirError as error:
            self._wall.leave()
            call.refuse(call_status(error, _request_id(call.method, request, share)))
        else:
            self._loop.call_soon_threadsafe(self._begin, call, request, share)

    def _begin(self, call: ServerCall, request: bytes, share: Share | None) -> None:
        task = call.answer(self._answer(call, request, share))
        task.add_done_callback(lambda _: self._wall.leave())

    async def _answer(self, call: ServerCall, request: bytes, share: Share | None) -> None:
        """Answer a call; only those of administration have no share of the workers."""
        try:
            async with in_time(call, _DEADLINE_MARGIN), self._running():
                with self._wall.holding(len(request)):
                    response = await self._response(call, request, share)
        except CallFailed as failure:
            status = failure.status
        except TokenweirError as error:
            status = call_status(error, request_id_in(call.method, request))
        else:
            await call.finish(response)
            return
        await abort(call, status)

    async def _response(
        self, call: ServerCall, request: bytes, share: Share | None
    ) -> bytes | None:
        if call.method == _GET_LOAD:
            return await self._get_load()
        relay = self._relay_unary if call.method in _UNARY else self._relay_stream
        if share is None:
            return await relay(call.method, request, call)
        async with self._admission.turn(share, call.time_remaining()):
            return await relay(call.method, request, call)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Refuse a call once draining; else know of it until it ends."""
        if self._draining:
            raise _draining()
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            yield
        finally:
            self._calls.discard(task)

    @contextmanager
    def _upstream(self, backend: Backend, call: aio.Call) -> Iterator[None]:
        """Let `close` end a call that is under way at a worker, with a reason for the client.

        It cancels the call there, not the task here: that could be in the middle of a write, and
        then gRPC takes no status.
        """
        self._upstream_calls.add(call)
        try:
            with backend.under_way(call):
                yield
        except asyncio.CancelledError:  # by `close`; else by the client, who hears nothing more
            if self._closing:
                raise _draining() from None
            raise
        finally:
            self._upstream_calls.discard(call)

    async def _relay_unary(self, method: str, request: bytes, context: ServerCall) -> bytes:
        attempts = self._attempts(method, request)
        while True:
            backend = await self._pool.choose(attempts)
            ask: aio.UnaryUnaryMultiCallable[bytes, bytes] = backend.channel.unary_unary(method)
            call = ask(request, timeout=context.time_remaining(), metadata=self._forwarded(context))
            try:
                with self._upstream(backend, call):
                    response = await call
                    initial = _pairs(await call.initial_metadata())
                    trailing = _pairs(await call.trailing_metadata())
            except (aio.AioRpcError, WorkerLost) as error:
                _retry_or_raise(attempts, backend, error)
                continue
            if initial:
                await context.send_initial_metadata(initial)
            context.set_trailing_metadata(trailing)
            return response

    async def _relay_stream(self, method: str, request: bytes, context: ServerCall) -> None:
        attempts = self._attempts(method, request)
        while True:
            backend = await self._pool.choose(attempts)
            ask: aio.UnaryStreamMultiCallable[bytes, bytes] = backend.channel.unary_stream(method)
            call = ask(request, timeout=context.time_remaining(), metadata=self._forwarded(context))
            committed = False
            try:
                with self._upstream(backend, call):
                    if initial := _pairs(await call.initial_metadata()):
                        committed = True
                        await context.send_initial_metadata(initial)
                    async for message in call:
                        committed = True
                        await context.write(message)
                    context.set_trailing_metadata(_pairs(await call.trailing_metadata()))
                    return
            except (aio.AioRpcError, WorkerLost) as error:
                if committed:
                    raise _end_of_started(attempts, error) from error
                _retry_or_raise(attempts, backend, error)
            finally:
                call.cancel()  # does nothing once the call has ended

    def _forwarded(self, context: ServerCall) -> Metadata:
        """Return the metadata of the client; what describes its connection stays behind.

        A worker is told what waits here for it and the others.
        """
        waiting = -(-self._admission.num_waiting // max(1, self.num_serving))
        pairs = _pairs(context.invocation_metadata())
        return (
            (WAITING_KEY, str(waiting)),
            *((key, value) for key, value in pairs if _is_clients(key)),
        )

    async def _get_load(self) -> bytes:
        """Return the load of all workers together; one that does not answer is left out."""
        loads = await asyncio.gather(
            *(backend.load(_GET_LOAD_TIMEOUT) for backend in self._pool.serving),
            return_exceptions=True,
        )
        merged = admin_service_pb2.GetLoadResponse()
        for load in loads:
            if isinstance(load, admin_service_pb2.GetLoadResponse):
                merged.MergeFrom(load)
        return merged.SerializeToString()

    def _attempts(self, method: str, request: bytes) -> Attempts:
        return Attempts(method, request, self._config.worker_wait, self._losses)


def _request_id(method: str, request: bytes | TokenweirError, share: Share | None) -> str:
    if not isinstance(request, bytes):
        return made_request_id()
    if share is not None and share.request_id and is_request_id(share.request_id):
        return share.request_id
    return request_id_in(method, request)


def _retry_or_raise(
    attempts: Attempts, backend: Backend, error: aio.AioRpcError | WorkerLost
) -> None:
    """Remember the failure if another worker may do better, else raise CallFailed."""
    status = _status(error, attempts.request_id)
    if status.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        raise CallFailed(status) from error
    logger.info("worker %s did not take a call: %s", backend.address, status.message)
    attempts.failed(backend, status, lost=status.reason == ReplicaLost.reason)


def _end_of_started(attempts: Attempts, error: aio.AioRpcError | WorkerLost) -> CallFailed:
    """Return how a call ends that had begun; ReplicasLost if it would end the next worker, too."""
    status = _status(error, attempts.request_id)
    if status.reason == ReplicaLost.reason:
        attempts.lost()
        attempts.refuse_poison()
    return CallFailed(status)


def _status(error: aio.AioRpcError | WorkerLost, request_id: str) -> CallStatus:
    """Return the worker's own words, or ReplicaLost if it can no longer speak."""
    if isinstance(error, WorkerLost) or (error.code() in _LOST and not _is_workers_own(error)):
        lost = ReplicaLost(
            "the replica that ran the request is gone; ask again, with the same request id",
            _RETRY_AFTER,
        )
        return call_status(lost, request_id)
    return CallStatus(error.code(), error.details() or "", _pairs(error.trailing_metadata()))


def _is_workers_own(error: aio.AioRpcError) -> bool:
    return any(key == DETAILS_KEY for key, _ in _pairs(error.trailing_metadata()))


async def _nothing_to_do(address: str) -> None:
    pass


def _draining() -> Draining:
    return Draining("this gateway is stopping; ask again", _RETRY_AFTER)


def _is_clients(key: str) -> bool:
    return key not in ("user-agent", WAITING_KEY) and not key.startswith("grpc-")


def _pairs(metadata: Any) -> Metadata:
    return tuple((key, value) for key, value in metadata or ())
