"""Notices that an engine's thread has been in one step for too long."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

_LOOKS = 8  # in the time that a step may take
_JOIN_PAUSE = 0.2  # seconds between two looks whether the last step will ever end
_JOIN_TIMEOUT = 30.0  # seconds


class StepWatch:
    """Knows since when the engine's thread has been in its step, for the event loop to ask."""

    def __init__(self, name: str, limit: float) -> None:
        self._name = name  # of the model
        self._limit = limit  # seconds
        self._since: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count as inside a step, in the engine's thread."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @property
    def is_over(self) -> bool:
        """Whether the step that runs has taken longer than it may."""
        since = self._since
        return since is not None and time.monotonic() - since > self._limit

    async def wait_until_over(self) -> None:
        """Return once a step has taken longer than it may."""
        while not self.is_over:
            await asyncio.sleep(min(self._limit / _LOOKS, 1.0))
        _log.error(
            "a step of %s has taken more than %g s, the most that max_step_seconds allows: the "
            "engine counts as hung",
            self._name,
            self._limit,
        )

    async def join(self, thread: threading.Thread) -> None:
        """Wait for the end of the engine's thread, unless its step takes longer than it may."""
        end = time.monotonic() + _JOIN_TIMEOUT
        while thread.is_alive() and time.monotonic() < end and not self.is_over:
            await asyncio.to_thread(thread.join, _JOIN_PAUSE)
