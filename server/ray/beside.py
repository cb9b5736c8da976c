"""A task that runs as long as a block does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from engine.background import in_background


@asynccontextmanager
async def beside(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `work` in the background meanwhile; see `in_background`."""
    task = in_background(name, work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
