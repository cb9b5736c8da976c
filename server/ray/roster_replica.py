"""The place where the workers of an application are known, when no command serves them."""

from __future__ import annotations

import asyncio

from server.auth.peers import peers_of
from server.config import gateway_config
from server.ray.publication import Publication, publish, published
from server.ray.registry import Registry
from server.ray.roster import Roster
from server.ray.serve_port import ServePort
from server.settings import Settings
from server.telemetry.logs import log_to_stderr
from server.telemetry.metrics import Snapshot
from server.telemetry.metrics_page import MetricsPage


class RosterReplica:
    """A Ray Serve replica with the roster; one that takes its place has the same secrets."""

    async def __init__(self, config: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr(config.log)
        self._serve_port = ServePort()
        self._roster = Roster(Registry())
        host = self._serve_port.host
        before = await asyncio.to_thread(published, config.listen.name)
        if before is None:
            address = await self._roster.start(host, peers_of(host))
        else:
            address = await self._roster.start(host, before.roster.peers, before.roster.token)
        settings = gateway_config(config)
        told = Publication(address, settings.max_request_bytes, settings.max_calls_per_worker)
        await asyncio.to_thread(publish, config.listen.name, told)
        if config.metrics.port is not None:
            self._page = MetricsPage(config, self._counted, list)

    async def check_health(self) -> None:
        """Raise if Ray Serve itself can be reached from other machines; it asks at the start."""
        self._serve_port.check()

    def _counted(self) -> Snapshot:
        return [("worker_restarts", (), self._roster.restarts.count)]
