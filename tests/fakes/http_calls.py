"""Calls of an HTTP server that runs in the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from tokenweir import AsyncClient

from server.adapters.config import HttpConfig
from server.adapters.http.serving import serve


class Caller:
    """Sends requests to an HTTP server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(
        self, path: str = "completions", headers: dict[str, str] | None = None, **body: object
    ) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}/v1/{path}", json=body, headers=headers) as found:
            return found.status, await found.json()

    async def stream(self, path: str = "completions", **body: object) -> list[Any]:
        """Return the data of the events; the last is "[DONE]" or an error."""
        url = f"{self.url}/v1/{path}"
        async with self.session.post(url, json={"stream": True, **body}) as found:
            assert found.headers["content-type"].startswith("text/event-stream")
            text = await found.text()
        assert text.endswith("\n\n")
        data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


@asynccontextmanager
async def http_server(
    address: str, config: HttpConfig | None = None, token: str | None = None
) -> AsyncIterator[Caller]:
    """Serve before the server at an address."""
    async with AsyncClient(address, max_attempts=1, timeout=60, token=token) as client:
        async with http_of(client, config) as caller:
            yield caller


@asynccontextmanager
async def http_of(
    client: AsyncClient, config: HttpConfig | None = None, admin: AsyncClient | None = None
) -> AsyncIterator[Caller]:
    """Serve by a client."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = config or HttpConfig(port=0, grace=1)
    serving = asyncio.create_task(serve(client, config, url.set_result, admin))
    try:
        async with aiohttp.ClientSession() as session:
            yield Caller(session, await url)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
