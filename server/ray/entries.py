"""The entries of a service in Ray's table of keys: one of itself, and one of each worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from engine.background import in_background
from server.auth.internal_certificate import InternalCertificate
from server.ray.internals import Table

SERVICE = "service"  # its key
BEAT = 2.0  # seconds between two that a worker writes


class _Entry:
    def to_json(self) -> bytes:
        """Return it as `from_json` reads it."""
        return TypeAdapter(type(self)).dump_json(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return what `to_json` has written; ValueError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(data)
        except ValidationError:  # its message would tell values, the certificate's key among them
            raise ValueError(
                "an entry there is not one that this release reads; neighbouring releases work "
                "together"
            ) from None


@dataclass(frozen=True)
class ServiceEntry(_Entry):
    """A service: how its workers are reached, and what of its settings concerns gateways."""

    id: str  # another one whenever the service is started
    certificate: InternalCertificate | None  # the certificate of its workers, None: they have none
    max_request_bytes: int
    max_calls_per_worker: int
    is_claimed: bool = False  # by a command, see claim.py
    is_over: bool = False  # every call has had the time to end
    traffic: Mapping[str, Any] | None = None  # told by a gateway that loads models; see Traffic


@dataclass(frozen=True)
class WorkerEntry(_Entry):
    """A worker, as it says itself, again every now and then."""

    service: str  # the id
    actor: str  # name of the process in Ray
    group: str  # name of its application
    pid: int
    stderr: str  # the file that its standard error goes to
    address: str = ""  # host:port of its gRPC server, once it serves
    replica_id: str = ""  # as in Provenance, likewise
    state: Literal["here", "leaving", "failed"] = "here"  # it has failed: nobody told it to go
    problem: str = ""  # why it cannot start
    beat: int = 0  # one more each time that this is written

    def __str__(self) -> str:
        return f"worker {self.address}, process {self.pid}, replica {self.replica_id}"

    @property
    def key(self) -> str:
        """Its key, which no other process has."""
        return f"{self.actor} {self.pid}"

    @property
    def name(self) -> str:
        """Its name in the log."""
        return self.address or f"process {self.pid}"

    @property
    def runs(self) -> bool:
        """Whether its process has not ended, on its own machine."""
        return os.path.exists(f"/proc/{self.pid}")


class Presence:
    """Writes the entry of this worker again and again as long as it lives, and changes at once."""

    def __init__(self, table: Table, entry: WorkerEntry) -> None:
        self.entry = entry
        self._table = table
        self._writing = asyncio.Lock()
        self._beating = in_background("telling that the worker lives", self._beat)

    async def publish(self, **changes: Any) -> None:
        """Change the entry, and write it if the cluster answers."""
        async with self._writing:  # an older one is never written after it
            self.entry = replace(self.entry, **changes, beat=self.entry.beat + 1)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._table.put, self.entry.key, self.entry.to_json())

    async def close(self) -> None:
        """Write it no more."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self.publish()
            await asyncio.sleep(BEAT)
