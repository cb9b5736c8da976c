"""Which calls a worker takes: it counts those that run a model, and refuses the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from engine.errors import Draining
from server.call_wall import CallWall
from server.interceptors import Behavior, Context, Handler, WrappingInterceptor, with_behavior

_DRAINING_RETRY_AFTER = 0.5  # seconds; another replica is chosen sooner than that


class AdmissionInterceptor(WrappingInterceptor):
    """Counts the calls that run a model; refuses new ones at the wall, or once the worker drains.

    Other calls, of health and what operators ask, are never refused for want of room.
    """

    def __init__(self, services: frozenset[str], wall: CallWall) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._wall = wall
        self.live = 0
        self.num_waiting = 0  # at the gateway, for this worker
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def load(self) -> int:
        """The calls that are live here, and those that wait at the gateway for this worker."""
        return self.live + self.num_waiting if self.live else 0

    async def wait_until_idle(self) -> None:
        """Wait until no call is live."""
        await self._idle.wait()

    def wrap(self, method: str, handler: Handler) -> Handler:
        if not method.startswith(self._prefixes):
            return handler

        async def around(behavior: Behavior, request: Any, context: Context) -> Any:
            if self.draining:
                raise Draining("this worker is stopping; ask again", _DRAINING_RETRY_AFTER)
            with self._wall.holding(len(request)):
                self.live += 1
                self._idle.clear()
                # After the status was sent, not before. The stubs want a class that nobody makes.
                context.add_done_callback(cast(Any, self._end))
                return await behavior(request, context)

        return with_behavior(handler, around)

    def _end(self, ctx: Context) -> None:
        self.live -= 1
        if not self.live:
            self._idle.set()
