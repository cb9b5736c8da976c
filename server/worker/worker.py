"""One gRPC server on the engines of one process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from typing import Protocol

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenweir.keepalive import keepalive_options
from tokenweir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prediction_service_pb2,
    prediction_service_pb2_grpc,
)

from engine.background import in_background
from engine.errors import ConfigError
from server.call_wall import CallWall
from server.config import WorkerConfig
from server.health import Health
from server.reflection import REFLECTION, enable_reflection
from server.worker.catalog import Catalog, Engine, GeneratingEngine, PredictingEngine
from server.worker.interceptors import (
    AdmissionInterceptor,
    ParsingInterceptor,
    StatusInterceptor,
    StreamParsingInterceptor,
)
from server.worker.service import AdminService, GenerationService, PredictionService, ServerFacts

GENERATION = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
PREDICTION = prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"].full_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICES = (GENERATION, PREDICTION, ADMIN)
FEATURES = (HEALTH, *REFLECTION)

_MAX_UNACCEPTED = 1 << 20  # calls that nobody has looked at; they have a few KiB each
LAST_WORDS = 1.0  # seconds in which calls that were ended tell their clients


class Worker:
    """Serves models by name; owns their engines from `start` to the end of `drain`."""

    def __init__(self, models: Mapping[str, Engine], config: WorkerConfig) -> None:
        clash = {"", *SERVICES} & set(models)
        if clash:
            raise ConfigError(f"no model can be named {sorted(clash)}: health uses these names")
        self.replica_id = uuid.uuid4().hex
        self._config = config
        self._catalog = Catalog(models, self.replica_id)
        self._wall = CallWall(config.max_concurrent_calls, config.max_open_bytes)
        self._admission = AdmissionInterceptor(frozenset({GENERATION, PREDICTION}), self._wall)
        self._health = Health()
        self._watching: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """False once an engine cannot serve any more."""
        return all(engine.healthy for engine in self._catalog.engines.values())

    def load(self) -> int:
        """Return how many calls a model answers, or that wait for it, at the gateway too."""
        return self._admission.load

    async def start(self) -> str:
        """Listen, start the engines, return "host:port" once they serve; until then they warm up.

        Raises ConfigError if nobody can listen there, and the engines are then not started;
        PackageError if a model fails when it is tried out.
        """
        self._server = self._make_server()
        self._add_services()
        port = listen(self._server, self._config.host, self._config.port)
        self._publish_health()
        await self._server.start()
        await self._start_engines()
        self._publish_health()
        self._watching = in_background("watching the engines", self._watch_engines)
        return address_of(self._config.host, port)

    async def drain(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end within `grace` seconds."""
        if self._watching is not None:
            self._watching.cancel()
        self._health.go_down()
        self._admission.draining = True
        await self._wait_until_idle(grace)
        # What still runs is ended with DRAINING, not by closing its connection.
        await asyncio.gather(*(e.stop(0) for e in self._catalog.engines.values()))
        await self._wait_until_idle(LAST_WORDS)
        self._health.close()
        await self._server.stop(LAST_WORDS)

    def _make_server(self) -> aio.Server:
        max_bytes = self._config.max_request_bytes
        return aio.server(
            interceptors=(
                StatusInterceptor(),
                self._admission,
                ParsingInterceptor(max_bytes),
                StreamParsingInterceptor(),
            ),
            options=server_options(max_bytes, self._config.client_silence),
        )

    def _add_services(self) -> None:
        config, server = self._config, self._server
        facts = ServerFacts(
            version=metadata.version("tokenweir"),
            start_time=datetime.now(UTC),
            features=FEATURES,
            limits=config.limits,
            max_request_bytes=config.max_request_bytes,
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(self._catalog, config.limits), server
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
            PredictionService(self._catalog, config.limits), server
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(self._catalog, facts, self._admission), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        enable_reflection((*SERVICES, HEALTH), server)

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
            self._publish_health()

    def _publish_health(self) -> None:
        """Set the health of every name: of a service by the engines that answer for it."""
        engines = self._catalog.engines
        generating = [e for e in engines.values() if isinstance(e, GeneratingEngine)]
        predicting = [e for e in engines.values() if isinstance(e, PredictingEngine)]
        healthy = {
            "": self.healthy,
            GENERATION: all(engine.healthy for engine in generating),
            PREDICTION: all(engine.healthy for engine in predicting),
            ADMIN: True,
            **{name: engine.healthy for name, engine in engines.items()},
        }
        for name, is_healthy in healthy.items():
            self._health.publish(name, serving=is_healthy)

    async def _wait_until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_until_idle(), seconds)


def max_message_bytes(max_request_bytes: int) -> int:
    """Return what gRPC takes: its refusal has no details, so up to here the worker says it."""
    return 4 * max_request_bytes


def server_options(max_request_bytes: int, client_silence: float) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options of every server here; the two are settings of GatewayConfig."""
    return (
        # gRPC cancels calls without a word where it believes that too many wait to be accepted.
        ("grpc.server.max_pending_requests", _MAX_UNACCEPTED),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNACCEPTED),
        ("grpc.so_reuseport", 0),  # else a second server on the port takes half of the calls
        ("grpc.max_receive_message_length", max_message_bytes(max_request_bytes)),
        # Gateways and clients notice by pings that a host is gone; by default that is abuse.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        *keepalive_options(client_silence, client_silence),
    )


class _Listening(Protocol):
    def add_insecure_port(self, address: str, /) -> int: ...


def listen(server: _Listening, host: str, port: int) -> int:
    """Bind a server, return its port; ConfigError if it cannot be had."""
    try:
        return server.add_insecure_port(address_of(host, port))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address_of(host, port)}: it is in use, or not allowed to this "
            "user; stop what uses it, or choose another port (0: any that is free)"
        ) from error


def address_of(host: str, port: int) -> str:
    """Return "host:port" as gRPC reads it, also for the numbers of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
