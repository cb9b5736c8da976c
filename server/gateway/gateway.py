"""The public port: which calls are taken, refused, or handed on to a worker."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from tokenweir.v1 import admin_service_pb2 as pb

from engine.background import in_background
from engine.errors import (
    CapabilityNotSupported,
    Draining,
    FieldViolation,
    MalformedMessage,
    PermissionDenied,
    QueueFull,
    TenantQuota,
    TokenweirError,
    Unauthenticated,
)
from server.api import HEALTH, METHODS, SERVICES
from server.auth.internal_certificate import InternalCertificate
from server.auth.quotas import Lease
from server.auth.tls import server_credentials
from server.auth.tokens import Identity
from server.calls.call_server import CallServer, ServerCall
from server.calls.call_wall import CallWall
from server.calls.deadlines import CLOSE_TIMEOUT, abort, in_time
from server.calls.event_thread import BackOff
from server.calls.health import Health
from server.calls.reflection import enable_reflection
from server.calls.running_requests import RunningRequests
from server.calls.status import call_status
from server.config import GatewayConfig
from server.gateway.admin.admin_port import AdminPort
from server.gateway.admin.admin_service import AdminService
from server.gateway.admin.versions import Deployment, Group, Versions
from server.gateway.admission import Admission
from server.gateway.affinity import Affinity
from server.gateway.authenticator import Authenticator
from server.gateway.backend import WorkerLink
from server.gateway.book import Book
from server.gateway.losses import HasCrashed
from server.gateway.pool import CallFailed, Lost, Pool, do_nothing
from server.gateway.relay import Relay
from server.gateway.request_head import NO_HEAD, RequestHead, head_of, request_id_of
from server.gateway.request_reader import READ_TIMEOUT, RequestReader
from server.gateway.traffic import ModelVersion, Traffic
from server.listening import listen, max_connections, max_message_bytes, server_options
from server.local_services import LocalServices
from server.model_pages import page_of
from server.telemetry.metrics import Snapshot
from server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_PACKAGE = "/tokenweir.v1."
_ADMIN = f"{_PACKAGE}AdminService/"
_HEALTH = f"/{HEALTH}/"
_LIST_MODELS = f"{_ADMIN}ListModels"
_RETRY_AFTER = 0.5  # seconds
_NEVER = 2**31 - 1  # milliseconds, as gRPC has it
_DEADLINE_MARGIN = 0.01  # seconds; less than a worker's, whose words say more
# Refusals that say nothing of the load: for them new calls of others need not wait.
_OF_THE_CALLER = (PermissionDenied, TenantQuota, Unauthenticated)
_UNARY = frozenset(path for path, method in METHODS.items() if not method.server_streaming)


class Gateway:
    """One port before many workers."""

    def __init__(
        self,
        config: GatewayConfig,
        lost: Lost = do_nothing,
        certificate: InternalCertificate | None = None,
        tracing: Tracing | None = None,
        deployment: tuple[Deployment, Group] | None = None,
        has_crashed: HasCrashed = lambda address: None,
    ) -> None:
        """Call `lost` with the address of a worker that `sync` left out and that hangs.

        `certificate` is the one that the workers ask for, None for workers that take all calls.
        Operators load and unload models if there is a deployment, with the models that it has
        started. `has_crashed` is that of Losses.
        """
        self._config = config
        self._traffic = Traffic()
        self._back_off = BackOff()
        silence, logs = config.worker_keepalive_timeout, config.logs_workers
        self.pool = Pool(  # the workers that it knows
            self._publish_health,
            lost,
            WorkerLink(silence, certificate, logs),
            self._traffic,
            Affinity() if config.prefix_affinity else None,
        )
        self._health = Health()
        self._wall = CallWall(config.max_concurrent_calls, config.max_open_bytes)
        self._reader = RequestReader(
            max_bytes=config.max_open_bytes,
            max_message_bytes=max_message_bytes(config.max_request_bytes),
        )
        self._authenticator = Authenticator(config)
        self._admission = Admission()
        self._book = Book(self.pool.addresses, tracing)
        self._versions = (
            None if deployment is None else Versions(self.pool, self._traffic, *deployment)
        )
        self._relay = Relay(
            self.pool,
            config.worker_wait,
            lambda: self._admission.num_waiting,
            self._book,
            has_crashed,
        )
        self._calls: set[asyncio.Task[Any]] = set()
        self._requests = RunningRequests()
        self._admin: AdminPort | None = None
        self.admin_port: int | None = None  # once it is open
        self._draining = False
        self._models: set[str] = set()  # ever seen: their health must turn when they go

    async def start(self) -> int:
        """Listen; return the port.

        Raises ConfigError if nobody can listen there, or the certificate cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        credentials = server_credentials(self._config.tls)
        max_bytes = self._config.max_request_bytes
        self._local = LocalServices(max_bytes, READ_TIMEOUT)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._local)
        if self._config.reflection:
            enable_reflection((*SERVICES, HEALTH), self._local)
        most = max_connections(self._config.host)
        logger.info("up to %s connections at once, as open files allow (ulimit -n)", f"{most:,}")
        options = server_options(max_bytes, self._config.client_keepalive_timeout, most)
        age = min(self._config.max_connection_age * 1000, _NEVER)
        options = (*options, ("grpc.max_connection_age_ms", round(age)))
        self._server = CallServer(self._arrived, options, self._back_off)
        port = listen(self._server, self._config.host, self._config.port, credentials)
        if (socket := self._config.local_socket) is not None:
            listen(self._server, f"unix:{socket}", 0)
        self._publish_health()
        admin_port = self._config.admin.port
        if admin_port is not None or socket is not None:
            service = AdminService(
                self.pool, self._traffic, self._requests, lambda: self.drain(None), self._versions
            )
            self._admin = AdminPort(self._config, service, self._health)
            self.admin_port = self._admin.start(admin_port)
        self._server.start()
        self._late = in_background("watching for requests", self._reader.end_late_ones)
        return port

    def snapshot(self) -> Snapshot:
        """Return what is counted here, for the metrics page; any thread may ask."""
        return [
            *self._book.counts.snapshot(),
            ("gateway_requests_waiting", (), self._admission.num_waiting),
            ("gateway_requests_running", (), len(self._calls)),
            ("workers_serving", (), self.pool.num_serving),
        ]

    def worker_snapshots(self) -> list[tuple[str, Snapshot]]:
        """Return what workers tell of their engines, and what is counted of their calls here.

        By worker; as `snapshot`.
        """
        engines = [(worker.address, worker.samples) for worker in self.pool.serving]
        return [*engines, *self._book.snapshots()]

    async def drain(self, grace: float | None) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end within `grace` seconds.

        None: wait for all of them. Requests that clients send right after an answer are still
        refused, except with 0.
        """
        self._health.go_down()
        self._draining = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        if grace != 0:
            await self._server.wait_until_quiet()

    async def close(self) -> None:
        """End everything; an open server or channel would keep the interpreter from exiting."""
        await self.drain(0)
        self._admission.refuse_waiting(_draining())
        await self.pool.refuse_waiting(_draining())
        self._relay.end_calls(_draining())
        self._health.close()
        self._late.cancel()
        if self._versions is not None:
            await self._versions.close()
        await self._server.stop(CLOSE_TIMEOUT)
        if self._admin is not None:
            await self._admin.close()
        self._book.flush()
        await self.pool.close()

    def _publish_health(self) -> None:
        serving = self.pool.serving
        served = {one for backend in serving for one in backend.models}
        self._traffic.update(served)
        self._set_slots()
        ready = {one.model for one in served if self._traffic.is_open(one)}
        self._models |= ready
        for name in ("", *SERVICES):
            self._health.publish(name, serving=bool(serving))
        for name in self._models:
            self._health.publish(name, serving=name in ready)

    def _set_slots(self) -> None:
        """Limit calls in flight so that each worker has one full batch.

        Each gateway may use its part of every batch, and what others leave of theirs. It hears
        of their calls within about a second.
        """
        most, contended = self._config.max_calls_per_worker, self._config.contended_calls_per_worker
        serving = self.pool.serving
        taken = self._traffic.taking({one for backend in serving for one in backend.models})
        taking = [backend for backend in serving if not taken.isdisjoint(backend.models)]
        num_slots = sum(
            max(math.ceil(most / max(1, worker.num_gateways)), most - worker.of_others)
            for worker in taking
        )
        self._admission.set_slots(num_slots or None, len(taking) * contended)

    def _arrived(self, call: ServerCall) -> None:
        """In the thread of the server: read the request, if there is room for one more.

        Health and reflection always have it, and health is told to everybody.
        """
        identity = None
        try:
            if not call.method.startswith(_HEALTH):
                identity = self._authenticator.identity(call)
            if not call.method.startswith(_PACKAGE):
                self._loop.call_soon_threadsafe(lambda: call.answer(self._local.answer(call)))
                return
            self._wall.enter()
        except (Unauthenticated, QueueFull) as error:
            self._refuse(call, error, NO_HEAD, identity)
            return
        self._reader.read(call, lambda request: self._has_come(call, request, identity))

    def _has_come(
        self, call: ServerCall, request: bytes | TokenweirError, identity: Identity | None
    ) -> None:
        """Pass a call on to be answered, or refuse it at once; in any thread.

        The cheapest way under overload: the event loop is not woken, and the thread backs off.
        """
        head = lease = None
        try:
            if isinstance(request, TokenweirError):
                raise request
            if call.method.startswith(_ADMIN):
                if call.method != _LIST_MODELS:
                    name = call.method.removeprefix(_ADMIN)
                    raise CapabilityNotSupported(
                        f"{name} is not for this port; ask at the admin port, which `tokenweir "
                        "serve --admin-port` opens",
                        [name],
                    )
            else:
                head = head_of(call.method, request)
                if identity is not None:
                    request, head = self._authenticator.identified(
                        identity, call.method, request, head
                    )
                if not self._draining:
                    self._admission.refuse_if_too_late(head, call.time_remaining())
                if identity is not None:
                    lease = self._authenticator.acquire(identity)
        except TokenweirError as error:
            self._wall.leave()
            self._refuse(call, error, head or NO_HEAD, identity)
        else:
            if head is not None:
                self._admission.expect(head)
            self._loop.call_soon_threadsafe(self._begin, call, request, head, lease)

    def _refuse(
        self, call: ServerCall, error: TokenweirError, head: RequestHead, identity: Identity | None
    ) -> None:
        """In any thread: end a call that nobody answers."""
        request_id = request_id_of(head)
        status = call_status(error, request_id)
        call.refuse(status)
        if identity is not None:  # whatever its message says
            head = replace(head, tenant=identity.tenant)
        self._book.refused(call, request_id, head, status, error.reason)
        if not isinstance(error, _OF_THE_CALLER):
            self._back_off.want()

    def _begin(
        self, call: ServerCall, request: bytes, head: RequestHead | None, lease: Lease | None
    ) -> None:
        if lease is not None:
            call.before_end(lambda: self._authenticator.release(lease, call))
        task = call.answer(self._answer(call, request, head))
        self._calls.add(task)
        task.add_done_callback(self._has_ended)
        if head is not None:  # behind the task's first step, in which it asks for its turn
            self._loop.call_soon(self._admission.has_come, head)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._wall.leave()

    async def _answer(self, call: ServerCall, request: bytes, head: RequestHead | None) -> None:
        """Answer a call; those of administration have no head."""
        with self._book.answering(call):
            try:
                if self._draining:
                    raise _draining()
                response = await self._response(call, request, head)
            except CallFailed as error:
                status, told = error.status, head or NO_HEAD
                self._book.failed(call, request_id_of(told), told, status)
            except TokenweirError as error:
                told = head or NO_HEAD
                status = call_status(error, request_id := request_id_of(told))
                self._book.refused(call, request_id, told, status, error.reason)
            except asyncio.CancelledError:
                if not call.is_relayed and head is not None:
                    self._book.given_up(call, request_id_of(head), head)
                raise
            else:
                await call.finish(response)
                return
            await abort(call, status)

    async def _response(
        self, call: ServerCall, request: bytes, head: RequestHead | None
    ) -> bytes | None:
        """Return the one message of an answer, while the bytes of its request are counted."""
        self._wall.hold(len(request))
        try:
            async with in_time(call, _DEADLINE_MARGIN):
                if head is None:
                    return await self._list_models(call, request)
                relay = self._relay.unary if call.method in _UNARY else self._relay.stream
                arrived = time.monotonic()
                with self._requests.abortable(head.request_id):
                    async with self._admission.slot(head, call.time_remaining()):
                        self._book.had_its_turn(time.monotonic() - arrived)
                        return await relay(call.method, request, call, head)
        finally:
            self._wall.release(len(request))

    async def _list_models(self, call: ServerCall, data: bytes) -> bytes | None:
        """Return the models that the caller may use; wait for a worker if need be."""
        usable = self._authenticator.usable_models(call)
        try:
            request = pb.ListModelsRequest.FromString(data)
        except DecodeError:
            what = f"{len(data)} bytes are not a request of {_LIST_MODELS}"
            raise MalformedMessage([FieldViolation("request", what)]) from None
        await self._relay.wait_for_worker()
        models = [
            info
            for info in self.pool.models()
            if (usable is None or info.model in usable)
            and self._traffic.is_open(ModelVersion.of(info))
        ]
        return page_of(models, request).SerializeToString()


def _draining() -> Draining:
    return Draining("this gateway is stopping; ask again", _RETRY_AFTER)
