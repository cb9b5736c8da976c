"""Finds the workers of a service in Ray's table of keys, and keeps a pool equal to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.gateway.pool import Pool
from server.ray.entries import SERVICE, ServiceEntry, WorkerEntry
from server.ray.internals import Table
from server.ray.stderr_tail import has_crashed, num_oom_kills, stderr_tail
from server.telemetry.logs import with_fields
from server.telemetry.metrics import Snapshot

LOOK_PERIOD = 0.5  # seconds between two looks at the table
TIME_TO_LIVE = 6.0  # seconds that a worker is believed in which writes nothing
_MAX_LEFT = 100  # workers that have left and may still be asked for
Told = Callable[[ServiceEntry], None]
logger = logging.getLogger(__name__)


class Restarts:
    """How many workers have taken the place of one that died or hung, by their replicas."""

    def __init__(self) -> None:
        self.count = 0
        self._lost: dict[str, None] = {}
        self._known: set[str] = set()

    def joined(self, replica_id: str) -> None:
        """Note that a worker serves; one whose connection broke may come back itself."""
        if replica_id in self._known:
            self._lost.pop(replica_id, None)
            return
        self._known.add(replica_id)
        if self._lost:
            del self._lost[next(iter(self._lost))]
            self.count += 1

    def lost(self, replica_id: str) -> None:
        """Note that a worker is gone that was not told to go."""
        self._lost[replica_id] = None


@dataclass
class _Seen:
    """A worker whose entry was seen."""

    entry: WorkerEntry
    since: float  # when that has last changed
    num_oom_kills: int  # on this machine when it was new
    has_joined: bool = False
    has_left: bool = False


class Discovery:
    """Looks at the entries of a service again and again.

    A worker is gone that has written nothing for a while, and tells nothing either. One whose
    process has ended on this machine is gone at once. While the table cannot be read, or has no
    service, those stay that are known: they say themselves how they are.
    """

    def __init__(self, table: Table, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._own: Callable[[], ServiceEntry] | None = None
        self.service: ServiceEntry | None = None  # as it was last seen, or told
        self.restarts = Restarts()
        self._seen: dict[str, _Seen] = {}
        self._left: dict[str, _Seen] = {}  # the last of them, by address
        self._known: list[str] = []  # addresses
        self._is_lost = False  # it has been logged
        self._problem = ""  # the last that was logged since a worker has joined

    @property
    def workers(self) -> tuple[WorkerEntry, ...]:
        """The workers that take calls."""
        return tuple(s.entry for s in self._seen.values() if s.has_joined and not s.has_left)

    @property
    def num_here(self) -> int:
        """The number of workers that have a process, serving or not yet."""
        return sum(self._is_ours(seen) and not seen.has_left for seen in self._seen.values())

    def has_crashed(self, address: str) -> bool | None:
        """Return how the process of a worker has ended; see `Loss`."""
        seen = self._by_address(address)
        return None if seen is None else has_crashed(seen.entry.stderr, seen.num_oom_kills)

    def find(self, address: str) -> WorkerEntry | None:
        """Return a worker that is here or has left of late."""
        seen = self._by_address(address)
        return None if seen is None else seen.entry

    def snapshot(self) -> Snapshot:
        """Return what is counted here, for the metrics page; any thread may ask."""
        return [("worker_restarts", (), self.restarts.count)]

    async def publish(self, own: Callable[[], ServiceEntry]) -> None:
        """Write the entry of the service from now on, instead of reading it."""
        self._own = own
        await self._tell_service(own())

    async def follow(self, pool: Pool, told: Told | None = None) -> None:
        """Keep a pool equal to the workers for ever; call `told` when the service has changed."""
        while True:
            try:
                await self.look(pool, told)
                if self._is_lost:
                    logger.info("the workers of the service are told again")
                self._is_lost = False
            except (OSError, ValueError) as error:
                if not self._is_lost:
                    what = "the service does not tell its workers: %s; those known stay"
                    logger.warning(what, error)
                self._is_lost = True
            await asyncio.sleep(LOOK_PERIOD)

    async def look(self, pool: Pool, told: Told | None = None) -> None:
        """Make it so once; OSError or ValueError if there is nothing to see."""
        now = self._clock()  # before it reads: this process may be stopped meanwhile
        entries = await asyncio.to_thread(self._table.read)
        data = entries.pop(SERVICE, None)
        if self._own is not None:
            if (own := self._own()) != self.service or data is None:  # the table has lost it
                await self._tell_service(own)
        else:
            if data is None:
                raise OSError("nobody serves under this name")
            if (service := ServiceEntry.from_json(data)) != self.service:
                self.service = service
                pool.trust(service.certificate)
                if told is not None:
                    told(service)
                # Before the workers: a version that is being loaded is closed.
                if service.traffic is not None:
                    await pool.apply_traffic(service.traffic)
        if self._is_lost:  # nobody could write
            for seen in self._seen.values():
                seen.since = now
        for key, value in entries.items():
            with contextlib.suppress(ValueError):  # a release wrote it that says other things
                self._see(key, WorkerEntry.from_json(value), now)
        for key, seen in tuple(self._seen.items()):
            is_silent = key not in entries or self._is_silent(seen, now)
            if is_silent and not pool.is_responsive(seen.entry.address, TIME_TO_LIVE):
                await asyncio.to_thread(self._table.delete, key)  # first: else it comes back
                del self._seen[key]
                self._leave(seen, is_lost=True)
                self._left[seen.entry.address] = seen
                if len(self._left) > _MAX_LEFT:
                    del self._left[next(iter(self._left))]
        addresses = [worker.address for worker in self.workers]
        if addresses != self._known:
            self._known = addresses
            await pool.sync(addresses)

    async def _tell_service(self, own: ServiceEntry) -> None:
        await asyncio.to_thread(self._table.put, SERVICE, own.to_json())
        self.service = own

    def _see(self, key: str, entry: WorkerEntry, now: float) -> None:
        """Take in an entry as it is now."""
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(entry, now, num_oom_kills())
        elif entry != seen.entry:
            seen.entry, seen.since = entry, now
        if seen.has_left or not self._is_ours(seen):
            return
        if entry.state != "here":
            self._leave(seen, is_lost=entry.state == "failed")
        elif entry.address and not seen.has_joined:
            seen.has_joined, self._problem = True, ""
            self.restarts.joined(entry.replica_id)
            logger.info("joined: %s", entry)

    def _is_ours(self, seen: _Seen) -> bool:
        """Whether it is of the service that is told, or was."""
        assert self.service is not None, "one is told"
        return seen.has_joined or seen.entry.service == self.service.id

    def _is_silent(self, seen: _Seen, now: float) -> bool:
        """Whether a worker writes its entry no more."""
        if not os.path.exists(seen.entry.stderr):  # it has another table of processes
            return now - seen.since > TIME_TO_LIVE
        if not seen.entry.runs:
            return True
        # One that loads a large model writes nothing for a while.
        return seen.has_joined and now - seen.since > TIME_TO_LIVE

    def _leave(self, seen: _Seen, *, is_lost: bool) -> None:
        """Note that a worker is here no more, once; lost is one that was not told to go."""
        if seen.has_left or not self._is_ours(seen):
            return
        seen.has_left, entry = True, seen.entry
        of_worker = with_fields(worker=entry.name)
        if entry.problem and entry.problem != self._problem:  # Ray tries again, with each of them
            self._problem = entry.problem
            logger.error("it cannot start: %s", entry.problem, extra=of_worker)
        if entry.state == "here" and not entry.runs and (text := stderr_tail(entry.stderr)):
            logger.error("it ended; the last that it wrote:\n%s", text, extra=of_worker)
        if not seen.has_joined:
            return
        logger.info("left: %s", entry)
        if is_lost:
            self.restarts.lost(entry.replica_id)

    def _by_address(self, address: str) -> _Seen | None:
        here = (seen for seen in self._seen.values() if seen.entry.address == address)
        return next(here, self._left.get(address))
