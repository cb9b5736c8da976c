"""The HTTP server in a process of its own, beside a gateway.

Its settings come by the standard input. It writes its URL to the standard output once it serves,
and its log to the standard error, a JSON object a line.
"""

from __future__ import annotations

import pickle
import socket
import sys

import uvloop
from tokenweir import AsyncClient

from engine.errors import ConfigError
from server.adapters.config import HttpConfig
from server.adapters.http.serving import serve
from server.settings import Log
from server.signals import cancelled_by_signals
from server.telemetry.logs import log_to_stderr

_ADMIN_SECONDS = 4.0


def main() -> None:
    """Serve what the standard input says, until a signal ends it."""
    log_to_stderr(Log(format="json"))
    try:
        uvloop.run(_serve(**pickle.load(sys.stdin.buffer)))
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


async def _serve(server: str, admin: str | None, config: HttpConfig, listener: int) -> None:
    """Serve at an inherited socket, in front of a server; `admin` is asked for its load."""
    with cancelled_by_signals():
        async with (
            # One attempt: clients are told when to come back.
            AsyncClient(server, timeout=config.timeout, max_attempts=1) as client,
            AsyncClient(
                admin or server,
                token=config.admin_token,
                timeout=_ADMIN_SECONDS,
                max_attempts=1,
            ) as operated,
        ):
            await serve(
                client,
                config,
                lambda url: print(url, flush=True),
                operated if admin else None,
                socket.socket(fileno=listener),
            )
