"""Which calls a worker takes: it counts those that run a model, and refuses the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import Draining
from server.api import GENERATION, PREDICTION
from server.calls.call_wall import CallWall
from server.local_services import AnswerableCall

_RUNNING = tuple(f"/{service}/" for service in (GENERATION, PREDICTION))
_DRAINING_RETRY_AFTER = 0.5  # seconds; another replica is chosen sooner than that


def runs_model(method: str) -> bool:
    """Return whether calls of a method run a model; others are of health and of operators."""
    return method.startswith(_RUNNING)


class WorkerAdmission:
    """Counts the calls that run a model; refuses new ones at the wall, or once the worker drains.

    Other calls are never refused for want of room.
    """

    def __init__(self, wall: CallWall) -> None:
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

    @contextmanager
    def admit(self, call: AnswerableCall, num_bytes: int) -> Iterator[None]:
        """Let a call with a request of so many bytes in, for LocalServices."""
        if not runs_model(call.method):
            yield
            return
        if self.draining:
            raise Draining("this worker is stopping; ask again", _DRAINING_RETRY_AFTER)
        with self._wall.holding(num_bytes):
            self.live += 1
            self._idle.clear()
            call.add_done_callback(self._end)  # after the status was sent, not before
            yield

    def _end(self, call: AnswerableCall) -> None:
        self.live -= 1
        if not self.live:
            self._idle.set()
