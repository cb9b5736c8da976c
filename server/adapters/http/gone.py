"""Ends calls of the server behind whose callers are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from server.adapters.http.errors import HttpError

T = TypeVar("T")
_CLIENT_GONE = 499  # nobody reads it


async def unless_gone(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Return what a call of the server returns; end it as soon as the caller is gone."""
    work, gone = asyncio.create_task(call), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise HttpError(_CLIENT_GONE, "the client has gone")
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
