"""Starts and ends workers while others serve: each group of them is an application of Ray Serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.errors import EngineFailure, LoadFailed
from engine.factory import device_of
from server.gateway.admin.versions import Group
from server.packages.pinned import PinnedPackage, pin
from server.ray.address import joins_cluster
from server.ray.deployment import (
    deploy,
    deployment_problem,
    is_deployed,
    undeploy,
    undeploy_soon,
)
from server.ray.discovery import Discovery
from server.ray.entries import WorkerEntry
from server.ray.resources import num_threads, shortage_now
from server.ray.thread import RayThread
from server.settings import Settings

_POLL = 0.2  # seconds
_SHORTAGE_AFTER = 5.0  # seconds: what ended workers had is free a moment later
_START_TIMEOUT = 1800.0  # seconds
_END_TIMEOUT = 30.0  # seconds beyond the grace
_SEPARATOR = "+"  # no service has it in its name


class RayDeployment:
    """The workers of a service, by group."""

    def __init__(
        self, config: Settings, ray: RayThread, discovery: Discovery, service: str
    ) -> None:
        """`config` is as it was given, not yet for the targets of the packages.

        The service is given by its id.
        """
        self._config = config
        self._ray = ray
        self._discovery = discovery
        self._service = service
        self._applications = {config.listen.name}

    def read(self, address: str) -> PinnedPackage:
        """Check a package where it lies; PackageError says what is wrong."""
        pinned = pin(address, self._config.packages.require_signature)
        device_of(pinned.manifest, address, self._config.engine)
        return pinned

    async def start(self, group: Group) -> Sequence[str]:
        """Start workers; return their addresses once all are warm. Raises LoadFailed."""
        name, config = self._name(group), self._config_of(group)
        deadline = time.monotonic() + _SHORTAGE_AFTER
        while problem := await self._ray.run(shortage_now, config.engine.min_replicas, config):
            if time.monotonic() > deadline:
                raise LoadFailed(problem)
            await asyncio.sleep(_POLL)
        self._applications.add(name)
        await self._ray.run(deploy, config, self._service, group.packages, name)
        deadline = time.monotonic() + _START_TIMEOUT
        while len(workers := self._workers(name)) < config.engine.min_replicas:
            if problem := await self._ray.run(deployment_problem, name):
                raise LoadFailed(f"the workers do not start: {problem}")
            if time.monotonic() > deadline:
                raise LoadFailed(f"after {_START_TIMEOUT:g} s the workers have not started")
            await asyncio.sleep(_POLL)
        return [worker.address for worker in workers]

    async def end(self, group: Group) -> None:
        """Drain workers within the grace; return when their processes are gone."""
        if (name := self._name(group)) not in self._applications:
            return  # it has never begun
        here = [] if joins_cluster() else self._workers(name)
        await self._ray.run(undeploy_soon, (name,))
        deadline = time.monotonic() + self._config.listen.grace + _END_TIMEOUT
        while (
            await self._ray.run(is_deployed, name)
            or self._workers(name)
            or any(worker.runs for worker in here)
        ):
            if time.monotonic() > deadline:
                raise EngineFailure(f"the processes of {name} do not end; stop the server")
            await asyncio.sleep(_POLL)
        self._applications.discard(name)

    async def end_all(self) -> None:
        """Begin to take away all workers that are left; return once they have drained."""
        await self._ray.run(undeploy_soon, self._applications)
        for name in self._applications:
            while await self._ray.run(is_deployed, name):
                await asyncio.sleep(_POLL)

    def undeploy(self) -> None:
        """Take away all workers that are left; replicas drain."""
        undeploy(self._applications)

    def _config_of(self, group: Group) -> Settings:
        models = {model: one.address for model, one in group.packages.items()}
        packages = replace(self._config.packages, models=models)
        config = replace(self._config, packages=packages)
        config = config.with_engine(num_threads=num_threads(self._config))
        if group.replicas:
            config = config.with_engine(min_replicas=group.replicas, max_replicas=group.replicas)
        return config.for_targets([one.manifest.target for one in group.packages.values()])

    def _name(self, group: Group) -> str:
        """Return what the group is called by Ray Serve."""
        service = self._config.listen.name
        return f"{service}{_SEPARATOR}{group.name}" if group.name else service

    def _workers(self, name: str) -> list[WorkerEntry]:
        return [worker for worker in self._discovery.workers if worker.group == name]
