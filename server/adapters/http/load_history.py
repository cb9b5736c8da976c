"""The load of the server behind: now, and of late."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
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
        self.now: tuple[ReplicaLoad, ...] = ()
        self.workers: tuple[ReplicaInfo, ...] = ()
        self.problem = ""  # why there is no load now
        self.moments: deque[Moment] = deque()

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_PAUSE)

    async def look(self) -> None:
        """Ask once, and forget what is too old."""
        now = self._clock()
        try:
            self.now, info = await asyncio.gather(self._admin.load(), self._admin.server_info())
        except TokenweirClientError as error:
            self.now, self.workers, self.problem = (), (), f"the admin port: {error}"
        else:
            self.workers, self.problem = info.replicas, ""
            moment = Moment(
                now,
                sum(load.running for load in self.now),
                sum(load.waiting for load in self.now),
                sum(load.tokens_per_second for load in self.now),
                100 * max((load.cache_used for load in self.now), default=0.0),
            )
            self.moments.append(moment)
        while self.moments and self.moments[0].time < now - _SECONDS:
            self.moments.popleft()
