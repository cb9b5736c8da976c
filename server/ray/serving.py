"""Serves models: Ray Serve replicas behind a gateway, from the first of them to the drain.

    command's process                                       Ray
    serving() ── Discovery ─── looks ───► table of keys ◄─── WorkerReplica, one a process
                   └── Gateway ◄───── the wire: calls, state, log ─────► Worker, its engines

Ray Serve places, health-checks, restarts and scales the replicas. Requests never pass through
Ray: every replica opens its own gRPC server and writes where into Ray's table of keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

import uvloop

from engine.background import beside
from engine.distributions import check_cuda_distribution, check_distributions
from engine.errors import EngineFailure
from server.adapters.config import http_config
from server.auth.internal_certificate import internal_certificate
from server.config import gateway_config
from server.gateway.admin.versions import Group
from server.gateway.authenticator import check_access
from server.gateway.backend import WorkerLink
from server.gateway.gateway import Gateway
from server.gateway.pool import Pool
from server.listening import address_of
from server.process import keep_what_is_there
from server.ray.address import joins_cluster
from server.ray.cluster import node_address, running_ray, table_of
from server.ray.deployment import checked_packages, deploy, deployment_problem
from server.ray.discovery import Discovery
from server.ray.entries import SERVICE, ServiceEntry
from server.ray.internals import Table
from server.ray.processes.http_process import http_beside
from server.ray.processes.run_directory import run_directory
from server.ray.resources import shortage_now
from server.ray.thread import RayLost, RayThread
from server.ray.versions import RayDeployment
from server.settings import Settings
from server.signals import cancelled_by_signals
from server.telemetry.metrics_page import MetricsPage
from server.telemetry.tracing import make_tracing

_ADMIN_TOKEN = "TOKENWEIR_ADMIN_TOKEN"  # the variable; the HTTP server asks for load with it
_END_TIMEOUT = 5.0  # seconds, beside the grace
SHORTAGE_AFTER, SHORTAGE_PERIOD = 7.0, 60.0  # seconds: it is told first, and again
logger = logging.getLogger(__name__)


@dataclass
class Service:
    """A service that `serving` has started."""

    pool: Pool
    discovery: Discovery
    ray: RayThread
    address: str = ""  # the gateway's, if it has one
    admin_address: str | None = None
    http_url: str | None = None


def serve_models(config: Settings, announce: Callable[[Service], None]) -> None:
    """Serve until a signal ends it, then drain; call `announce` once requests are answered.

    Raises ConfigError or PackageError before Ray is started, EngineFailure if no worker starts,
    RayLost if Ray is gone or hangs: what is left of it in this process keeps the interpreter.
    """

    async def serve() -> None:
        with cancelled_by_signals():
            async with serving(config) as service:
                keep_what_is_there()
                announce(service)
                await service.ray.wait_until_lost()  # without it no worker is replaced

    uvloop.run(serve())  # a refusal costs a fifth less


@contextlib.asynccontextmanager
async def serving(config: Settings) -> AsyncIterator[Service]:
    """Start Ray, the workers and the gateway; at the end drain and stop them all."""
    check_access(config)
    check_distributions()
    packages, given = await asyncio.to_thread(checked_packages, config)
    targets = [one.manifest.target for one in packages.values()]
    if not joins_cluster() and "cuda" in map(config.engine.device_for, targets):
        check_cuda_distribution()  # on a cluster workers run where others have installed it
    config = given.for_targets(targets)
    tracing = make_tracing(config.tracing, config.listen.name)
    async with contextlib.AsyncExitStack() as stack:
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        ray = await stack.enter_async_context(running_ray(config))
        host = await ray.run(node_address)
        certificate = internal_certificate(host)
        table = await ray.run(table_of, config.listen.name)
        discovery = Discovery(table)
        settings = replace(gateway_config(config), logs_workers=True)
        if config.http.port is not None:
            socket = stack.enter_context(run_directory()) / "gateway"
            settings = replace(settings, local_socket=socket)
        own = ServiceEntry(
            secrets.token_hex(8),
            certificate,
            settings.max_request_bytes,
            settings.max_calls_per_worker,
            is_claimed=joins_cluster(),
        )
        deployment = RayDeployment(given, ray, discovery, own.id)
        hung = partial(kill_hung, ray, discovery)
        gateway, port = None, 0
        if config.listen.gateway:
            started = (deployment, Group("", packages))
            gateway = Gateway(settings, hung, certificate, tracing, started, discovery.has_crashed)
            port = await gateway.start()
            stack.push_async_callback(gateway.close)  # after the last messages of the workers
            pool = gateway.pool
        else:
            link = WorkerLink(
                settings.worker_keepalive_timeout, certificate, logs=True, only_watches=True
            )
            pool = Pool(lambda: None, hung, link)
            stack.push_async_callback(pool.close)
        if config.metrics.port is not None:
            here = (
                [discovery.snapshot] if gateway is None else [gateway.snapshot, discovery.snapshot]
            )
            workers = list if gateway is None else gateway.worker_snapshots
            page = MetricsPage(config, here, workers)
            stack.push_async_callback(asyncio.to_thread, page.close)
        stack.push_async_callback(_withdraw, table)
        stack.push_async_callback(ray.finish, deployment.undeploy)
        await discovery.publish(
            lambda: own if gateway is None else replace(own, traffic=pool.traffic_state())
        )
        await ray.run(deploy, config, own.id, packages, config.listen.name)
        if joins_cluster():
            stack.push_async_callback(_end_workers, config, pool, deployment)
        if gateway is not None:
            stack.push_async_callback(_tell_all_is_over, table, own)
        follow = partial(discovery.follow, pool)
        await stack.enter_async_context(beside("following the workers", follow))
        service = Service(pool, discovery, ray)
        if gateway is not None:
            service.address = address_of(config.listen.host, port)
            if gateway.admin_port is not None:
                service.admin_address = address_of(config.listen.host, gateway.admin_port)
        await _wait_until_served(config, service)
        if settings.local_socket is not None:
            http = http_beside(
                http_config(config, os.environ.get(_ADMIN_TOKEN)), settings.local_socket
            )
            service.http_url = await stack.enter_async_context(http)
        if gateway is not None:
            stack.push_async_callback(gateway.drain, config.listen.grace)
        yield service


async def _tell_all_is_over(table: Table, own: ServiceEntry) -> None:
    """End the wait of workers that are told to go."""
    with contextlib.suppress(OSError):
        await asyncio.to_thread(table.put, SERVICE, replace(own, is_over=True).to_json())


async def _withdraw(table: Table) -> None:
    """Withdraw the service, and what its workers have left."""
    with contextlib.suppress(OSError):
        for key in [SERVICE, *await asyncio.to_thread(table.read)]:
            await asyncio.to_thread(table.delete, key)


async def kill_hung(ray: RayThread, discovery: Discovery, address: str) -> None:
    """Kill a worker that hangs, by Ray: it does not stop when it is asked to."""
    if (worker := discovery.find(address)) is not None:
        logger.info("killed: %s", worker)
        with contextlib.suppress(RayLost):  # then it goes with Ray
            await ray.run(_kill_actor, worker.actor)


def _kill_actor(name: str) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
        ray.kill(ray.get_actor(name, namespace="serve"))


async def _end_workers(config: Settings, pool: Pool, deployment: RayDeployment) -> None:
    """Drain workers of the calls of other gateways, which nobody here waits for."""
    if config.listen.gateway and all(worker.num_gateways <= 1 for worker in pool.backends):
        return
    with contextlib.suppress(TimeoutError, RayLost):
        async with asyncio.timeout(config.listen.grace + _END_TIMEOUT):
            await deployment.end_all()


async def _wait_until_served(config: Settings, service: Service) -> None:
    ray, started, told = service.ray, time.monotonic(), 0
    while service.pool.num_serving < config.engine.min_replicas:
        problem = await ray.run(deployment_problem, config.listen.name)
        if problem:
            raise EngineFailure(f"the workers do not start: {problem}")
        if time.monotonic() - started > SHORTAGE_AFTER + told * SHORTAGE_PERIOD:
            told += 1
            missing = config.engine.min_replicas - service.discovery.num_here
            if problem := await ray.run(shortage_now, missing, config):
                logger.warning(problem)
        await asyncio.sleep(0.2)
