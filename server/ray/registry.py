"""Knows which workers are alive."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

HEARTBEAT = 1.0  # seconds between two of a worker
TIME_TO_LIVE = 4.0  # seconds that the registry believes in a worker without a heartbeat


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as the registry knows it."""

    address: str  # host:port of its gRPC server
    pid: int
    replica_id: str  # as in Provenance
    actor: str = ""  # that the process is to Ray, by name
    group: str = ""  # with which it was started, by the name of its application

    def __str__(self) -> str:
        return f"worker {self.address}, process {self.pid}, replica {self.replica_id}"


class Registry:
    """The table of living workers: they renew their entry, and the gateway waits for changes."""

    def __init__(self, time_to_live: float = TIME_TO_LIVE) -> None:
        self._time_to_live = time_to_live
        self._expiries: dict[WorkerInfo, asyncio.TimerHandle] = {}
        self._news = asyncio.Event()

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that are alive now."""
        return tuple(self._expiries)

    def put(self, worker: WorkerInfo) -> None:
        """Note that a worker is alive."""
        if worker in self._expiries:
            self._expiries[worker].cancel()
        else:
            self._news.set()
        loop = asyncio.get_running_loop()
        self._expiries[worker] = loop.call_later(self._time_to_live, self.drop, worker)

    def drop(self, worker: WorkerInfo) -> None:
        """Forget a worker at once."""
        if expiry := self._expiries.pop(worker, None):
            expiry.cancel()
            self._news.set()

    async def changed(self, seen: tuple[WorkerInfo, ...]) -> tuple[WorkerInfo, ...]:
        """Return the workers as soon as they are others than those seen."""
        while self.workers == seen:
            self._news.clear()
            await self._news.wait()
        return self.workers
