"""A worker in a process of Ray: it loads its engines, serves, and tells the command so."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from engine.background import in_background
from engine.config import EngineConfig
from engine.errors import EngineFailure, PackageError, TokenweirError
from engine.factory import load_engine
from server.auth.peers import Peers
from server.config import worker_config
from server.packages.address import is_remote
from server.packages.pinned import PinnedPackage
from server.process import keep_what_is_there, switch_threads_often
from server.ray.claim import undeploy_if_abandoned
from server.ray.publication import published
from server.ray.registry import HEARTBEAT, WorkerInfo
from server.ray.resources import num_threads
from server.ray.roster import RosterAddress
from server.ray.roster_link import LinkHandler, RosterLink
from server.ray.serve_port import ServePort
from server.settings import Log, Settings
from server.telemetry.logs import set_level
from server.worker.engines import Engine
from server.worker.worker import Worker

DEREGISTERED_PAUSE = 0.3  # seconds for gateways to see that a replica goes, before it refuses
UNHEALTHY_GRACE = 2.0  # seconds that running requests get of a replica that cannot serve any more
UNHEALTHY_EXIT = 5.0  # seconds in which such a replica ends, whatever hangs in it
ABANDONED_AFTER = 5.0  # seconds without the command, until a replica looks if it is gone
logger = logging.getLogger(__name__)


class WorkerReplica:
    """A Ray Serve replica: engines, the worker that serves them, and its place in the registry."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: Settings,
        roster: RosterAddress | None,
        packages: Mapping[str, PinnedPackage],
        group: str,
        _beside: object = None,
    ) -> None:
        """Without a roster it is that of an application, which runs beside the workers."""
        switch_threads_often()
        has_command = roster is not None
        find = partial(_published_roster, config.listen.name)
        roster = roster or await _when_published(find)
        self._link = RosterLink(roster, find=None if has_command else find)
        _forward_log(self._link, config.log)
        if has_command:
            look = partial(self._end_without_command, config.listen.name, group)
            self._looking = in_background("looking for the command", look)
        try:
            info = await self._start(config, packages, roster.peers)
            self._info = dataclasses.replace(info, group=group)
        except Exception as error:
            is_expected = isinstance(error, TokenweirError)
            logger.error("it cannot start: %s", error, exc_info=not is_expected)
            await self._link.leave()
            await self._link.close()
            raise
        keep_what_is_there()
        self._link.alive(self._info)
        self._watching = in_background("watching the worker", self._end_when_unhealthy)

    async def _start(
        self, config: Settings, packages: Mapping[str, PinnedPackage], peers: Peers | None
    ) -> WorkerInfo:
        self._serve_port = ServePort()
        engines = await asyncio.to_thread(_load_engines, config, packages)
        self._grace = config.listen.grace
        self._worker = Worker(engines, worker_config(config, self._serve_port.host), peers)
        return WorkerInfo(
            address=await self._worker.start(),
            pid=os.getpid(),
            replica_id=self._worker.replica_id,
            actor=_actor_name(),
        )

    async def check_health(self) -> None:
        """Raise if the worker cannot serve; Ray Serve then replaces the replica.

        Its first call is part of the start.
        """
        self._serve_port.check()
        if not self._worker.healthy:
            raise EngineFailure(f"worker {self._info.address} or one of its engines is unhealthy")
        if self._link.broken:
            raise EngineFailure(f"worker {self._info.address} no longer sends heartbeats")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray Serve how busy the worker is; LiveRequestsPolicy reads it."""
        return {"live_requests": float(self._worker.load())}

    async def __del__(self) -> None:
        """Leave: Ray Serve awaits this before it stops a replica."""
        if not hasattr(self, "_watching"):
            return  # never got as far as to serve
        self._watching.cancel()
        grace = 0.0 if await self._link.leave() else self._grace
        await asyncio.sleep(DEREGISTERED_PAUSE)
        await self._worker.drain(grace)
        await self._link.close()

    async def _end_without_command(self, name: str, group: str) -> None:
        """Undeploy the group once its command is gone: a cluster would run it forever."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            if self._link.silence > ABANDONED_AFTER:
                await asyncio.to_thread(undeploy_if_abandoned, name, group)

    async def _end_when_unhealthy(self) -> None:
        """End the process at once: Ray Serve would ask three times, then allow the whole grace."""
        while self._worker.healthy:
            await asyncio.sleep(HEARTBEAT)
        logger.error("%s cannot serve any more; its process ends", self._info)
        try:
            async with asyncio.timeout(UNHEALTHY_EXIT):
                await self._link.leave(fails=True)
                await self._worker.drain(min(self._grace, UNHEALTHY_GRACE))
                await self._link.close()
        finally:
            os._exit(1)


def _load_engines(config: Settings, packages: Mapping[str, PinnedPackage]) -> Mapping[str, Engine]:
    engine_config = dataclasses.replace(config.engine_config, num_threads=num_threads(config))
    return {
        name: _load_engine(package, config.packages.cache, engine_config)
        for name, package in packages.items()
    }


def _load_engine(pinned: PinnedPackage, cache: Path | None, config: EngineConfig) -> Engine:
    package = pinned.load(cache)
    try:
        return load_engine(package, config)
    except PackageError as error:
        if not is_remote(pinned.address):
            raise
        raise PackageError(
            f"{error}; that is a copy of {pinned.address}, and a changed copy is fetched again: "
            "change the package there"
        ) from error


async def _published_roster(name: str) -> RosterAddress | None:
    found = await asyncio.to_thread(published, name)
    return None if found is None else found.roster


async def _when_published(find: Callable[[], Awaitable[RosterAddress | None]]) -> RosterAddress:
    while (found := await find()) is None:
        await asyncio.sleep(HEARTBEAT)
    return found


def _actor_name() -> str:
    import ray

    return str(ray.get_runtime_context().get_actor_name())


def _forward_log(link: RosterLink, config: Log) -> None:
    """Tell the command the log of this process: nobody reads the files of a worker."""
    logging.getLogger().addHandler(LinkHandler(link))
    set_level(config)
