"""Ray's table of keys without a Ray, and entries of workers in it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from server.auth.internal_certificate import InternalCertificate
from server.ray.entries import SERVICE, ServiceEntry, WorkerEntry
from server.ray.internals import Table


class FakeTable(Table):
    """A table in this process; while it is `broken` nobody answers."""

    def __init__(self) -> None:
        super().__init__("nowhere", "")
        self.values: dict[str, bytes] = {}
        self.is_broken = False
        self._beats = itertools.count(1)

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> None:
        self._check()
        if overwrite or key not in self.values:
            self.values[key] = value

    def get(self, key: str) -> bytes | None:
        self._check()
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self._check()
        self.values.pop(key, None)

    def read(self) -> dict[str, bytes]:
        self._check()
        return {**self.values}

    def _check(self) -> None:
        if self.is_broken:
            raise OSError("the cluster does not answer")

    def serve(
        self, certificate: InternalCertificate | None = None, service: str = "s", batch: int = 33
    ) -> None:
        """Tell a service."""
        self.put(SERVICE, ServiceEntry(service, certificate, 1 << 20, batch).to_json())

    def publish(self, worker: WorkerEntry) -> None:
        """Tell a worker, once more if it is told already."""
        self.put(worker.key, replace(worker, beat=next(self._beats)).to_json())


def worker_at(address: str, *, pid: int = 1, service: str = "s", stderr: str = "") -> WorkerEntry:
    """Return the entry of a worker that serves."""
    return WorkerEntry(service, f"actor {address}", "tokenweir", pid, stderr, address, address)
