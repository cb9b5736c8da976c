"""Serves models: Ray Serve replicas behind a gateway, from the first of them to the drain.

    command's process                                       Ray
    serving() ── Roster, Registry ◄── heartbeat, log ── WorkerReplica, one a process
                   └── Gateway ─────────── gRPC ─────────► Worker, its engines

Ray Serve places, health-checks, restarts and scales the replicas. Requests never pass through
Ray: every replica opens its own gRPC server and tells the roster where; the gateway follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial

import uvloop

from engine.distributions import check_cuda_distribution, check_distributions
from engine.errors import ConfigError, EngineFailure
from engine.factory import device_of
from engine.package.manifest import Manifest
from server.adapters.config import http_config
from server.auth.peers import peers_of
from server.config import gateway_config
from server.gateway.authenticator import check_access
from server.gateway.gateway import Gateway
from server.gateway.versions import Group
from server.listening import address_of
from server.packages.pinned import PinnedPackage, pin_all
from server.process import keep_what_is_there
from server.ray.address import joins_cluster
from server.ray.beside import beside
from server.ray.cluster import node_address, running_ray
from server.ray.deployment import deploy, deployment_problem
from server.ray.follow import follow, kill_hung
from server.ray.http_process import http_beside, private_socket
from server.ray.publication import Publication, publish, withdraw
from server.ray.registry import Registry, WorkerInfo
from server.ray.resources import shortage_now
from server.ray.roster import Roster, RosterAddress
from server.ray.thread import RayThread
from server.ray.versions import RayDeployment, loaded
from server.settings import Settings
from server.signals import cancelled_by_signals
from server.telemetry.metrics import Snapshot
from server.telemetry.metrics_page import MetricsPage
from server.telemetry.tracing import make_tracing

_ADMIN_TOKEN = "TOKENWEIR_ADMIN_TOKEN"  # the variable; the HTTP server asks for load with it
_END_TIMEOUT = 5.0  # seconds, beside the grace
SHORTAGE_AFTER, SHORTAGE_PERIOD = 7.0, 60.0  # seconds: it is told first, and again
logger = logging.getLogger(__name__)


class Service:
    """A service that `serving` has started."""

    def __init__(
        self,
        host: str,
        port: int | None,
        gateway: Gateway | None,
        registry: Registry,
        ray: RayThread,
    ) -> None:
        self.address = "" if port is None else address_of(host, port)
        admin_port = None if gateway is None else gateway.admin_port
        self.admin_address = None if admin_port is None else address_of(host, admin_port)
        self.http_url: str | None = None
        self._gateway = gateway
        self._registry = registry
        self._ray = ray

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers that are alive now."""
        return self._registry.workers

    @property
    def num_serving(self) -> int:
        """The number of workers that take calls, of the gateway if there is one."""
        return len(self._registry.workers) if self._gateway is None else self._gateway.num_serving

    async def wait_until_lost(self) -> None:
        """Raise RayLost as soon as Ray is gone: without it no worker is replaced."""
        await self._ray.wait_until_lost()


def serve_models(config: Settings, announce: Callable[[Service], None]) -> None:
    """Serve until a signal ends it, then drain; call `announce` once requests are answered.

    Raises ConfigError or PackageError before Ray is started, EngineFailure if no worker starts,
    RayLost if Ray is gone or hangs: what is left of it in this process keeps the interpreter.
    """
    uvloop.run(_serve_until_signal(config, announce))  # a refusal costs a fifth less


@contextlib.asynccontextmanager
async def serving(config: Settings) -> AsyncIterator[Service]:
    """Start Ray, the workers and the gateway; at the end drain and stop them all."""
    _check_is_reachable(config)
    check_access(config)
    packages, manifests = await _checked_packages(config)
    if any(manifest.image for manifest in manifests):
        config = config.with_room_for_images()
    given = config
    config = config.for_targets([manifest.target for manifest in manifests])
    tracing = make_tracing(config.tracing, config.listen.name, "gateway")
    async with contextlib.AsyncExitStack() as stack:
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        ray = await stack.enter_async_context(running_ray(config))
        registry = Registry()
        roster = Roster(registry)
        host = await ray.run(node_address)
        peers = peers_of(host)
        roster_address = await roster.start(host, peers)
        stack.push_async_callback(roster.close)
        workers: dict[str, WorkerInfo] = {}
        settings = gateway_config(config)
        if config.http.port is not None:
            settings = replace(settings, local_socket=stack.enter_context(private_socket()))
        deployment = RayDeployment(given, ray, registry, roster_address)
        gateway = port = None
        if config.listen.gateway:
            hung = partial(kill_hung, ray, workers)
            started = (deployment, _first_group(packages, manifests))
            gateway = Gateway(settings, hung, peers, tracing, started)
            port = await gateway.start()
            stack.push_async_callback(gateway.close)  # after the workers have had their last words
            roster.traffic, roster.explain_loss = gateway.told_traffic, gateway.explain_loss
        if config.metrics.port is not None:
            page = _metrics_page(config, gateway, roster)
            stack.push_async_callback(asyncio.to_thread, page.close)
        stack.push_async_callback(ray.finish, deployment.undeploy)
        if gateway is not None:
            stack.callback(roster.end)
        await ray.run(deploy, config, roster_address, packages, config.listen.name)
        if joins_cluster():
            stack.push_async_callback(_end_workers, config, ray, roster, deployment)
            await stack.enter_async_context(_published(config, ray, roster_address))
        if gateway is not None:
            following = partial(follow, registry, gateway, workers)
            await stack.enter_async_context(beside("following the registry", following))
        service = Service(config.listen.host, port, gateway, registry, ray)
        await _wait_until_served(config, service, ray, roster)
        if (socket := settings.local_socket) is not None:
            has_admin = settings.admin.port is not None
            http = http_config(config, os.environ.get(_ADMIN_TOKEN))
            beside_it = http_beside(http, socket, has_admin=has_admin)
            service.http_url = await stack.enter_async_context(beside_it)
        if gateway is not None:
            stack.push_async_callback(gateway.drain, config.listen.grace)
        yield service


def _check_is_reachable(config: Settings) -> None:
    """Raise ConfigError for workers that no gateway finds."""
    if not (config.listen.gateway or joins_cluster()):
        raise ConfigError(
            "listen.gateway (false) leaves workers that no gateway finds: only on the "
            "Ray cluster at RAY_ADDRESS `tokenweir gateway` finds them"
        )


def _first_group(packages: Mapping[str, PinnedPackage], manifests: list[Manifest]) -> Group:
    """Return the models that are there from the start."""
    found = zip(packages.items(), manifests, strict=True)
    return Group("", {name: loaded(pinned, manifest) for (name, pinned), manifest in found})


@contextlib.asynccontextmanager
async def _published(
    config: Settings, ray: RayThread, roster: RosterAddress
) -> AsyncIterator[None]:
    """Let gateways of the cluster find the service."""
    limits = gateway_config(config)
    told = Publication(roster, limits.max_request_bytes, limits.max_calls_per_worker)
    await ray.run(publish, config.listen.name, told)
    try:
        yield
    finally:
        await ray.finish(withdraw, config.listen.name)


async def _checked_packages(
    config: Settings,
) -> tuple[Mapping[str, PinnedPackage], list[Manifest]]:
    """Return what is served, with the manifests; raise if this machine cannot run it."""
    check_distributions()
    packages, manifests = await asyncio.to_thread(
        pin_all, config.packages.models, config.packages.require_signature
    )
    places = config.packages.models.values()
    devices = [
        device_of(m, place, config.engine) for m, place in zip(manifests, places, strict=True)
    ]
    if not joins_cluster() and "cuda" in devices:
        check_cuda_distribution()  # on a cluster workers run where others have installed it
    return packages, manifests


async def _end_workers(
    config: Settings, ray: RayThread, roster: Roster, deployment: RayDeployment
) -> None:
    """Let workers end what other gateways have given them, which nobody here waits for."""
    if config.listen.gateway and not roster.num_followers:
        return
    await ray.finish(deployment.undeploy_soon)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.listen.grace + _END_TIMEOUT):
            while roster.num_workers:
                await asyncio.sleep(0.1)


def _metrics_page(config: Settings, gateway: Gateway | None, roster: Roster) -> MetricsPage:
    def counted_here() -> Snapshot:
        counted = [] if gateway is None else gateway.snapshot()
        return [*counted, ("worker_restarts", (), roster.restarts.count)]

    workers = list if gateway is None else gateway.worker_snapshots
    return MetricsPage(config, counted_here, workers)


async def _serve_until_signal(config: Settings, announce: Callable[[Service], None]) -> None:
    with cancelled_by_signals() as seen:
        try:
            async with serving(config) as service:
                keep_what_is_there()
                announce(service)
                await service.wait_until_lost()
        except asyncio.CancelledError:
            if not seen:
                raise


async def _wait_until_served(
    config: Settings, service: Service, ray: RayThread, roster: Roster
) -> None:
    started, told = time.monotonic(), 0
    while service.num_serving < config.engine.min_replicas:
        problem = await ray.run(deployment_problem, config.listen.name)
        if problem:
            raise EngineFailure(f"the workers do not start: {problem}")
        if time.monotonic() - started > SHORTAGE_AFTER + told * SHORTAGE_PERIOD:
            told += 1
            missing = config.engine.min_replicas - roster.num_workers
            if problem := await ray.run(shortage_now, missing, config):
                logger.warning(problem)
        await asyncio.sleep(0.2)
