"""Runs the HTTP server until its task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from tokenweir import AsyncClient

from server.http.app import application
from server.http.config import HttpConfig


async def serve(client: AsyncClient, config: HttpConfig, announce: Callable[[str], None]) -> None:
    """Serve, having told `announce` the URL; when cancelled, let open requests end first.

    Raises OSError for a port that cannot be had.
    """
    listener = _listen(config)
    server = _Server(
        uvicorn.Config(
            application(client, config),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=config.grace,  # type: ignore[arg-type]  # seconds of asyncio
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announce(_url(config.host, listener))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command."""
        yield


def _listen(config: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=1024)


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
