"""Runs the HTTP server until its task is cancelled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from tokenweir import AsyncClient

from engine.background import in_background
from server.adapters.config import HttpConfig
from server.adapters.http.app import application
from server.adapters.http.page.load_history import LoadHistory
from server.auth.tls import server_context
from server.http_server import HttpServer
from server.listening import address_of, listen_at


async def serve(
    client: AsyncClient,
    config: HttpConfig,
    announce: Callable[[str], None],
    admin: AsyncClient | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve, having told `announce` the URL; when cancelled, let open requests end first.

    A `listener` that is there already takes the place of the configured host and port.
    `admin` calls the admin port of the server, for what the page shows of workers and load.
    Raises OSError for a port, ConfigError for a certificate that cannot be had.
    """
    history = None if admin is None else LoadHistory(admin)
    tls = None if config.tls.cert is None else server_context(config.tls)
    listener = listener or listen_at(config.host, config.port)
    app = application(client, config, history)
    server = HttpServer(app, config, tls, grace=config.grace)
    serving = asyncio.create_task(server.serve_at(listener))
    watching = None if history is None else in_background("looking at the load", history.watch)
    scheme = "http" if tls is None else "https"
    announce(f"{scheme}://{address_of(config.host, listener.getsockname()[1])}")
    try:
        await asyncio.shield(serving)
    finally:
        if watching is not None:
            watching.cancel()
        server.should_exit = True
        await serving
