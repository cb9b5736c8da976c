"""One gRPC server on the engines of one process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, cast

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from tokenweir.v1 import (
    admin_service_pb2_grpc,
    generation_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

from engine.background import in_background
from engine.errors import ConfigError
from server.api import ADMIN, GENERATION, HEALTH, PREDICTION, SERVICES
from server.auth.internal_certificate import InternalCertificate
from server.calls.call_server import CallServer, ServerCall
from server.calls.call_wall import CallWall
from server.calls.deadlines import CLOSE_TIMEOUT
from server.calls.health import Health
from server.calls.reflection import enable_reflection
from server.calls.running_requests import RunningRequests
from server.config import WorkerConfig
from server.listening import address_of, listen, max_connections, server_options
from server.local_services import AnswerableCall, Block, LocalServices, current_request_id
from server.wire import protocol
from server.wire.bearer import Bearer, BearerCall
from server.wire.work_pb2 import Models, State
from server.wire.worker_log import WorkerLog
from server.worker.admin import AdminService
from server.worker.admin_answers import engine_samples
from server.worker.admission import WorkerAdmission, runs_model
from server.worker.catalog import Catalog
from server.worker.engines import Engine
from server.worker.generation import GenerationService
from server.worker.prediction import PredictionService


class Worker:
    """Serves models by name; owns their engines from `start` to the end of `drain`."""

    def __init__(
        self,
        models: Mapping[str, Engine],
        config: WorkerConfig,
        certificate: InternalCertificate | None = None,
        log: WorkerLog | None = None,
    ) -> None:
        """Ask callers for a certificate, if it is given; send the log to gateways that want it."""
        clash = {"", *SERVICES} & set(models)
        if clash:
            raise ConfigError(f"no model can be named {sorted(clash)}: health uses these names")
        self.replica_id = uuid.uuid4().hex
        self._config = config
        self._certificate, self._log = certificate, log
        self._is_leaving = False
        self._catalog = Catalog(models, self.replica_id)
        wall = CallWall(config.max_worker_calls, config.max_open_bytes)
        self._admission = WorkerAdmission(wall)
        self._requests = RunningRequests()
        self._health = Health()
        self._bearers: set[Bearer] = set()  # to gateways
        self._watching: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """False once an engine cannot serve any more."""
        return all(engine.healthy for engine in self._catalog.engines.values())

    @property
    def num_gateways(self) -> int:
        """The number of gateways that send it calls."""
        return sum(not bearer.only_watches for bearer in self._bearers)

    def load(self) -> int:
        """Return how many calls a model answers, or that wait for it, at the gateway too."""
        return self._admission.load

    async def start(self) -> str:
        """Listen, start the engines, return "host:port" once they serve; until then they warm up.

        Raises ConfigError if nobody can listen there, and the engines are then not started;
        PackageError if a model fails when it is tried out.
        """
        config, self._loop = self._config, asyncio.get_running_loop()
        self._services = self._make_services()
        max_bytes = max(config.max_request_bytes, protocol.MAX_BYTES)
        options = server_options(
            max_bytes, config.client_keepalive_timeout, max_connections(config.host)
        )
        self._server = CallServer(
            lambda call: self._loop.call_soon_threadsafe(self._begin, call), options
        )
        credentials = None if self._certificate is None else self._certificate.server_credentials()
        port = listen(self._server, config.host, config.port, credentials)
        self._publish_health()
        self._server.start()
        await self._start_engines()
        self._publish_health()
        self._tell_state()  # it is warm
        self._watching = in_background("watching the engines", self._watch_engines)
        return address_of(self._config.host, port)

    def leave(self) -> None:
        """Ask gateways for no more calls, before any is refused."""
        self._is_leaving = True
        self._tell_state()

    async def drain(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end within `grace` seconds."""
        if self._watching is not None:
            self._watching.cancel()
        self._refuse_new()
        await self._wait_until_idle(grace)
        # Calls that still run are ended with DRAINING, not by closing their connections.
        await asyncio.gather(*(e.stop(0) for e in self._catalog.engines.values()))
        await self._wait_until_idle(CLOSE_TIMEOUT)
        self._health.close()
        for bearer in tuple(self._bearers):
            bearer.close()
        await self._server.stop(CLOSE_TIMEOUT)

    async def _empty(self) -> None:
        """Refuse new calls, as an operator wants it; return when none runs any more."""
        self._refuse_new()
        await self._admission.wait_until_idle()

    def _refuse_new(self) -> None:
        self._health.go_down()
        self._admission.draining = True
        self._tell_state()

    def _begin(self, call: ServerCall) -> None:
        if call.method != protocol.METHOD:
            call.answer(self._services.answer(call))
            return
        bearer = Bearer(call, self._answer, self._state, self._log)
        self._bearers.add(bearer)
        call.answer(bearer.carry()).add_done_callback(lambda _: self._has_left(bearer))
        self._tell_state()  # there is another gateway

    def _has_left(self, bearer: Bearer) -> None:
        self._bearers.discard(bearer)
        self._tell_state()

    def _answer(self, call: BearerCall) -> Coroutine[Any, Any, None]:
        """Answer a call of a gateway, which tells how many wait there for this worker."""
        if call.num_waiting is not None:
            self._admission.num_waiting = call.num_waiting
        return self._services.answer(call)

    def _state(self) -> State:
        """Return how the worker is, for gateways."""
        infos = [info.SerializeToString(deterministic=True) for info in self._admin.models()]
        is_healthy = self.healthy
        engines = self._catalog.engines if is_healthy else {}
        return State(
            serving=is_healthy and not (self._is_leaving or self._admission.draining),
            num_calls=self._admission.live,
            num_gateways=self.num_gateways,
            models=Models(infos=infos),
            samples=engine_samples(engines),
        )

    def _tell_state(self) -> None:
        for bearer in self._bearers:
            bearer.send_state()

    def _make_services(self) -> LocalServices:
        config = self._config
        services = LocalServices(
            config.max_request_bytes, admit=self._admission.admit, identify=self._abortable
        )
        server = cast(aio.Server, services)  # it has what is asked of one here
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(self._catalog, config), server
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
            PredictionService(self._catalog, config), server
        )
        self._admin = AdminService(
            self._catalog, config, self._admission, self._requests, self._empty
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        enable_reflection((*SERVICES, HEALTH), services)
        return services

    def _abortable(self, call: AnswerableCall) -> Block:
        """Let operators end calls that run a model, for LocalServices."""
        return self._requests.abortable(current_request_id() if runs_model(call.method) else "")

    async def _start_engines(self) -> None:
        started: list[Engine] = []
        try:
            for engine in self._catalog.engines.values():
                await engine.start()
                started.append(engine)
        except BaseException:
            for engine in started:
                await engine.stop(0)
            self._health.close()
            await self._server.stop(0)
            raise

    async def _watch_engines(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_period)
            if self._publish_health():
                self._tell_state()

    def _publish_health(self) -> bool:
        """Set the health of every name: of a service by the engines that answer for it.

        Return whether one has changed.
        """
        engines = self._catalog.engines
        generating = self._catalog.generators.values()
        predicting = self._catalog.predictors.values()
        healthy = {
            "": self.healthy,
            GENERATION: all(engine.healthy for engine in generating),
            PREDICTION: all(engine.healthy for engine in predicting),
            ADMIN: True,
            **{name: engine.healthy for name, engine in engines.items()},
        }
        changes = [self._health.publish(name, serving=one) for name, one in healthy.items()]
        return any(changes)

    async def _wait_until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_until_idle(), seconds)
