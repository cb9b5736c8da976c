"""The load of the server behind: now, and of late."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from tokenweir import AsyncClient, ReplicaInfo, ReplicaLoad, TokenweirClientError

_PAUSE = 5.0  # seconds between two looks
_SECONDS = 600.0  # length of the history


@dataclass(frozen=True)
class Moment:
    """The load of all workers together."""

    time: float  # seconds since 1970
    running: int
    waiting: int
    tokens_per_second: float
    cache_percent: float  # the fullest worker's


class LoadHistory:
    """Asks an admin port again and again."""

    def __init__(self, admin: AsyncClient, clock: Callable[[], float] = time.time) -> None:
        self._admin, self._clock = admin, clock
        self.workers: tuple[ReplicaInfo, ...] = ()
        self.problem = ""  # why there is no load now
        self._seen: deque[tuple[float, tuple[ReplicaLoad, ...]]] = deque()

    def now(self, models: Set[str] | None = None) -> list[ReplicaLoad]:
        """Return the load of these models now, of all for None; empty while it is not known."""
        return [] if self.problem or not self._seen else _of(models, self._seen[-1][1])

    def moments(self, models: Set[str] | None = None) -> Iterator[Moment]:
        """Yield the load of these models, of all for None, from the oldest moment on."""
        for moment, seen in self._seen:
            loads = _of(models, seen)
            yield Moment(
                moment,
                sum(load.running for load in loads),
                sum(load.waiting for load in loads),
                sum(load.tokens_per_second for load in loads),
                100 * max((load.cache_used for load in loads), default=0.0),
            )

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_PAUSE)

    async def look(self) -> None:
        """Ask once, and forget what is too old."""
        now = self._clock()
        try:
            loads, info = await asyncio.gather(self._admin.load(), self._admin.server_info())
        except TokenweirClientError as error:
            self.workers, self.problem = (), f"the load is not known now; the admin port: {error}"
        else:
            self.workers, self.problem = info.replicas, ""
            self._seen.append((now, loads))
        while self._seen and self._seen[0][0] < now - _SECONDS:
            self._seen.popleft()


def _of(models: Set[str] | None, loads: tuple[ReplicaLoad, ...]) -> list[ReplicaLoad]:
    return [load for load in loads if models is None or load.model in models]
