"""Notices that an engine has been in one step for too long, or fails in every one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

_log = logging.getLogger(__name__)

_PATIENCE = 4  # times the largest step of the warm-up: others may use the cores, too
_LOOKS = 8  # in the time that a step may take
_JOIN_PAUSE = 0.005  # seconds between two looks whether it has ended
_JOIN_TIMEOUT = 30.0  # seconds


class StepState(NamedTuple):
    """The start of the running step, if there is one, and how many failed in a row."""

    since: float | None = None  # on the monotonic clock
    consecutive_failures: int = 0


class StepWatch:
    """Knows since when an engine has been in its step, for the event loop to ask.

    `with watch:` counts as inside a step; one that raises has failed.
    """

    def __init__(
        self, name: str, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name  # the model's
        self._limit = limit  # seconds
        self._clock = clock
        self._since: float | None = None
        self.consecutive_failures = 0

    def allow(self, largest: float) -> None:
        """Let steps take several times as long as the largest took when the model was tried out."""
        if _PATIENCE * largest <= self._limit:
            return
        _log.warning(
            "a full step of %s takes %.3g s here: the engine counts as hung after %.3g s in one, "
            "%g times that, instead of %g s (max_step_seconds)",
            self._name,
            largest,
            _PATIENCE * largest,
            _PATIENCE,
            self._limit,
        )
        self._limit = _PATIENCE * largest

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._since = None
        self.consecutive_failures = 0 if error is None else self.consecutive_failures + 1

    @property
    def state(self) -> StepState:
        """How the steps are now, for `follow` in another process."""
        return StepState(self._since, self.consecutive_failures)

    def follow(self, state: StepState) -> None:
        """Watch the steps of another process, as it tells of them; the clock is the same."""
        self._since, self.consecutive_failures = state

    @property
    def is_over(self) -> bool:
        """Whether the step that runs has taken longer than it may."""
        since = self._since
        return since is not None and self._clock() - since > self._limit

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(self._limit / _LOOKS, 1.0)

    async def wait_until_over(self, look: Callable[[], None] = lambda: None) -> None:
        """Return once a step has taken longer than it may; `look` is called from time to time."""
        while not self.is_over:
            look()
            await asyncio.sleep(self.pause)
        _log.error(
            "a step of %s has taken more than %.3g s, the most that it may: the engine counts as "
            "hung",
            self._name,
            self._limit,
        )

    async def join(self, has_ended: Callable[[], bool]) -> None:
        """Wait for the end of what makes the steps, unless one takes longer than it may."""
        end = time.monotonic() + _JOIN_TIMEOUT
        while not (has_ended() or self.is_over or time.monotonic() > end):
            await asyncio.sleep(_JOIN_PAUSE)
