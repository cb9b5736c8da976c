"""A gateway by itself: it finds a service on its Ray cluster, and follows the workers of it.

It is no part of the cluster. It reads there which workers there are; all else goes from gateway to
workers. A gateway that ends takes nothing with it but the calls that it relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import uvloop

from engine.background import beside
from server.config import GatewayConfig, gateway_config
from server.gateway.authenticator import check_access
from server.gateway.gateway import Gateway
from server.listening import address_of
from server.process import keep_what_is_there
from server.ray.discovery import Discovery
from server.ray.entries import SERVICE, ServiceEntry
from server.ray.internals import Table
from server.settings import Settings
from server.signals import cancelled_by_signals
from server.telemetry.metrics_page import MetricsPage
from server.telemetry.tracing import make_tracing

_PAUSE = 1.0  # seconds between two looks for a service
logger = logging.getLogger(__name__)


def run_gateway(
    config: Settings, ray_address: str, announce: Callable[[str, Gateway], None]
) -> None:
    """Relay calls until a signal ends it, then drain; call `announce` with the address of the port.

    Raises ConfigError if nobody can listen there.
    """

    async def run() -> None:
        table = Table(ray_address, config.listen.name)
        with cancelled_by_signals():
            async with running_gateway_role(config, table) as (address, gateway):
                keep_what_is_there()
                announce(address, gateway)
                await asyncio.Event().wait()

    uvloop.run(run())


@contextlib.asynccontextmanager
async def running_gateway_role(
    config: Settings, table: Table
) -> AsyncIterator[tuple[str, Gateway]]:
    """Run a gateway before the workers of the service of a table; at the end drain it."""
    gateway_settings = gateway_config(config)
    check_access(config)
    tracing = make_tracing(config.tracing, config.listen.name)
    async with contextlib.AsyncExitStack() as stack:
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        first = await _wait_for(table, config.listen.name)
        settings = _settings(gateway_settings, first)
        discovery = Discovery(table)
        gateway = Gateway(
            settings,
            certificate=first.certificate,
            tracing=tracing,
            has_crashed=discovery.has_crashed,
        )
        port = await gateway.start()
        stack.push_async_callback(gateway.close)
        if config.metrics.port is not None:
            here = [gateway.snapshot, discovery.snapshot]
            page = MetricsPage(config, here, gateway.worker_snapshots)
            stack.push_async_callback(asyncio.to_thread, page.close)

        def told(service: ServiceEntry) -> None:
            if _settings(gateway_settings, service) != settings:
                logger.warning("the service has other limits by now; start this gateway again")

        follow = partial(discovery.follow, gateway.pool, told)
        await stack.enter_async_context(beside("following the service", follow))
        stack.push_async_callback(gateway.drain, config.listen.grace)
        yield address_of(settings.host, port), gateway


async def _wait_for(table: Table, name: str) -> ServiceEntry:
    """Return the service as soon as there is one; a gateway may be started before it."""
    is_told = False
    while True:
        problem = f"nobody serves under the name {name!r} there"
        try:
            if (data := await asyncio.to_thread(table.get, SERVICE)) is not None:
                return ServiceEntry.from_json(data)
        except (OSError, ValueError) as error:
            problem = str(error)
        if not is_told:
            logger.warning("waiting for the service: %s", problem)
            is_told = True
        await asyncio.sleep(_PAUSE)


def _settings(config: GatewayConfig, service: ServiceEntry) -> GatewayConfig:
    """Return the settings with what follows from those of the service."""
    return replace(
        config,
        max_request_bytes=service.max_request_bytes,
        max_calls_per_worker=service.max_calls_per_worker,
    )
