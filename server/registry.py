"""Knows which workers are alive; runs as a Ray actor, but has no Ray in it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

HEARTBEAT = 0.5  # seconds between two of a replica
TIME_TO_LIVE = 4.0  # seconds that the registry believes in a replica without a heartbeat


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as the registry knows it."""

    address: str  # host:port of its gRPC server
    pid: int
    replica_id: str  # as in Provenance
    actor: str = ""  # that the process is to Ray, by name

    def __str__(self) -> str:
        return f"worker {self.address}, process {self.pid}, replica {self.replica_id}"


class Registry:
    """The table of living workers.

    Replicas renew their entry, gateways wait for changes. After a restart the table is empty, so
    nothing is answered before every living replica has had the time for a heartbeat.
    """

    def __init__(self, time_to_live: float = TIME_TO_LIVE, settle: float = 2 * HEARTBEAT) -> None:
        self._time_to_live = time_to_live
        self._settled_at = time.monotonic() + settle
        self._expiry: dict[WorkerInfo, float] = {}
        self._version = time.time_ns()  # so that no version of an earlier life comes again
        self._is_over = False

    async def put(self, worker: WorkerInfo) -> None:
        """Note that a worker is alive."""
        if worker not in self._expiry:
            self._version += 1
        self._expiry[worker] = time.monotonic() + self._time_to_live

    async def drop(self, worker: WorkerInfo) -> bool:
        """Forget a worker at once; return whether all is over, so that nothing is waited for."""
        if self._expiry.pop(worker, None) is not None:
            self._version += 1
        return self._is_over

    async def end(self) -> None:
        """Note that all is over: every call has had the time to end."""
        self._is_over = True

    async def changed(self, seen: int, timeout: float = 1.0) -> tuple[int, tuple[WorkerInfo, ...]]:
        """Return version and workers as soon as the version is not `seen`, or after `timeout`."""
        end = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            for worker in [w for w, expiry in self._expiry.items() if expiry < now]:
                await self.drop(worker)
            if now >= self._settled_at and (self._version != seen or now >= end):
                return self._version, tuple(self._expiry)
            await asyncio.sleep(0.02)
