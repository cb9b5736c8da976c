"""A worker in a process of Ray: it loads its engines, serves, and lets gateways find it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import traceback
from collections.abc import Mapping
from functools import partial

from engine.background import in_background
from engine.errors import EngineFailure, PackageError, TokenweirError
from engine.factory import load_engine
from server.auth.internal_certificate import internal_certificate
from server.config import gateway_config, worker_config
from server.packages.address import is_remote
from server.packages.pinned import PinnedPackage
from server.process import keep_what_is_there, switch_threads_often
from server.ray.claim import undeploy_if_abandoned
from server.ray.cluster import table_of
from server.ray.entries import SERVICE, Presence, ServiceEntry, WorkerEntry
from server.ray.internals import ServePort, Table
from server.ray.resources import num_threads
from server.ray.stderr_tail import own_stderr
from server.settings import Settings
from server.telemetry.logs import set_level
from server.wire.worker_log import WorkerLog
from server.worker.engines import Engine
from server.worker.worker import Worker

LEAVING_PAUSE = 0.3  # seconds for gateways to see that a replica goes, before it refuses
UNHEALTHY_GRACE = 2.0  # seconds that running requests get of a replica that cannot serve any more
UNHEALTHY_EXIT = 5.0  # seconds in which such a replica ends, whatever hangs in it
_ABANDONED_PERIOD = 2.0  # seconds between two looks whether the command is gone
_HEALTH_PERIOD = 1.0  # seconds between two looks whether the worker can serve
logger = logging.getLogger(__name__)


class WorkerReplica:
    """A Ray Serve replica: engines, the worker that serves them, and its entry for gateways."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: Settings,
        service: str | None,
        packages: Mapping[str, PinnedPackage],
        group: str,
    ) -> None:
        """`service` is the id that a command has given it; an application has none."""
        import ray

        switch_threads_often()
        log = WorkerLog(config.log)
        logging.getLogger().addHandler(log)  # nobody reads the files of a worker
        set_level(config.log)
        self._serve_port = ServePort()
        self._table = table_of(config.listen.name)
        if service is None:
            tell = partial(_tell_application, self._table, config, self._serve_port.host)
            await asyncio.to_thread(tell)
        found = await asyncio.to_thread(_service_in, self._table, service)
        actor = str(ray.get_runtime_context().get_actor_name())
        entry = WorkerEntry(found.id, actor, group, os.getpid(), own_stderr())
        self._presence = Presence(self._table, entry)
        if found.is_claimed:
            look = partial(_end_without_command, config.listen.name, group)
            self._looking = in_background("looking for the command", look)
        self._grace = config.listen.grace
        try:
            engines = await asyncio.to_thread(_load_engines, config, packages)
            settings = worker_config(config, self._serve_port.host)
            self._worker = Worker(engines, settings, found.certificate, log)
            address = await self._worker.start()
        except Exception as error:
            is_expected = isinstance(error, TokenweirError)
            problem = str(error) if is_expected else traceback.format_exc()
            await self._presence.publish(state="failed", problem=problem)
            await self._presence.close()
            raise
        keep_what_is_there()
        await self._presence.publish(address=address, replica_id=self._worker.replica_id)
        self._watching = in_background("watching the worker", self._end_when_unhealthy)

    async def check_health(self) -> None:
        """Raise if the worker cannot serve; Ray Serve then replaces the replica.

        Its first call is part of the start.
        """
        self._serve_port.check()
        if not self._worker.healthy:
            raise EngineFailure(f"{self._presence.entry}, or one of its engines, is unhealthy")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Ray Serve how busy the worker is; LiveRequestsPolicy reads it."""
        return {"live_requests": float(self._worker.load())}

    async def __del__(self) -> None:
        """Leave: Ray Serve awaits this before it stops a replica."""
        if not hasattr(self, "_watching"):
            return  # never got as far as to serve
        self._watching.cancel()
        self._worker.leave()
        await self._presence.publish(state="leaving")
        await asyncio.sleep(LEAVING_PAUSE)
        await self._worker.drain(0.0 if await self._is_over() else self._grace)
        await self._presence.close()

    async def _is_over(self) -> bool:
        """Whether every call has had the time to end; others than the command's may be here."""
        if self._worker.num_gateways > 1:
            return False
        with contextlib.suppress(OSError, ValueError):
            data = await asyncio.to_thread(self._table.get, SERVICE)
            return data is not None and ServiceEntry.from_json(data).is_over
        return False

    async def _end_when_unhealthy(self) -> None:
        """End the process at once: Ray Serve would ask three times, then allow the whole grace."""
        while self._worker.healthy:
            await asyncio.sleep(_HEALTH_PERIOD)
        logger.error("%s cannot serve any more; its process ends", self._presence.entry)
        try:
            async with asyncio.timeout(UNHEALTHY_EXIT):
                await self._presence.publish(state="failed")
                await self._worker.drain(min(self._grace, UNHEALTHY_GRACE))
        finally:
            os._exit(1)


def _load_engines(config: Settings, packages: Mapping[str, PinnedPackage]) -> Mapping[str, Engine]:
    engine_config = dataclasses.replace(config.engine_config, num_threads=num_threads(config))
    engines: dict[str, Engine] = {}
    for name, pinned in packages.items():
        package = pinned.load(config.packages.cache)
        try:
            engines[name] = load_engine(package, engine_config)
        except PackageError as error:
            if not is_remote(pinned.address):
                raise
            raise PackageError(
                f"{error}; that is a copy of {pinned.address}, and a changed copy is fetched "
                "again: change the package there"
            ) from error
    return engines


async def _end_without_command(name: str, group: str) -> None:
    """Undeploy the group once its command is gone: a cluster would run it forever."""
    while True:
        await asyncio.sleep(_ABANDONED_PERIOD)
        await asyncio.to_thread(undeploy_if_abandoned, name, group)


def _tell_application(table: Table, config: Settings, host: str) -> None:
    """Write the entry of an application, whose workers are on hosts like this, or renew it."""
    limits = gateway_config(config)
    most = limits.max_request_bytes, limits.max_calls_per_worker
    own = ServiceEntry(secrets.token_hex(8), internal_certificate(host), *most)
    table.put(SERVICE, own.to_json(), overwrite=False)  # one of them is the first
    found = _service_in(table, None)
    own = dataclasses.replace(own, id=found.id, certificate=found.certificate)
    if own != found:  # it is deployed with other limits
        table.put(SERVICE, own.to_json())


def _service_in(table: Table, service: str | None) -> ServiceEntry:
    """Return the entry of the service of this id, or of an application."""
    data = table.get(SERVICE)
    if data is None or (found := ServiceEntry.from_json(data)).id != (service or found.id):
        raise EngineFailure("the command that has started this worker is gone")
    return found
