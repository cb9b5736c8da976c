"""Tasks that run beside the calls; one that fails is noticed, and most begin anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

RESTART_PAUSE = 0.5  # seconds


def in_background(
    name: str, work: Callable[[], Awaitable[None]], *, restart_pause: float | None = RESTART_PAUSE
) -> asyncio.Task[None]:
    """Run `work` in a task of its own until it returns or the task is cancelled.

    An error that it raises is logged under its name, and `work` begins anew after a pause; None:
    it does not.
    """
    return asyncio.create_task(_supervise(name, work, restart_pause), name=name)


@asynccontextmanager
async def beside(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `work` in the background as long as the block runs."""
    task = in_background(name, work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _supervise(name: str, work: Callable[[], Awaitable[None]], pause: float | None) -> None:
    while True:
        try:
            return await work()
        except Exception:
            what = "is given up" if pause is None else f"begins anew in {pause:g} s"
            logger.exception("%s has failed; it %s", name, what)
        if pause is None:
            return
        await asyncio.sleep(pause)
