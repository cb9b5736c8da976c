"""A worker's entry in Ray's table of keys, written again and again as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

from engine.background import in_background
from server.ray.entries import WorkerEntry
from server.ray.internals import Table

BEAT = 2.0  # seconds between two


class Presence:
    """Writes the entry of this worker, and what changes in it at once."""

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
