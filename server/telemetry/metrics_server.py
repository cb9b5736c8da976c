"""The HTTP server of the metrics page, in a thread of its own: many at once, each for so long.

It runs in the process of the gateway, beside the event loop of streams: pages and handshakes do not
hold them up, and a client that connects and says nothing must cost little.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Any

from server.hosts import family_of
from server.http_server import HttpServer
from server.settings import Http

_MOST = 32  # connections at once
_SECONDS = 10.0  # per connection, which has one request


class MetricsServer:
    """Answers from the start on, until `end`."""

    def __init__(self, host: str, port: int, app: Any, tls: ssl.SSLContext | None) -> None:
        """Listen, encrypted by this if it is given; OSError if nobody can."""
        self._listener = _Listener(family_of(host))
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(_MOST)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        bounds = Http(head_seconds=_SECONDS, keep_alive_seconds=_SECONDS, max_body_bytes=0)
        self._server = HttpServer(app, bounds, tls, [("connection", "close")], grace=1.0)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Listen no more."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        # uvloop would take connections without asking the listener.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._server.serve_at(self._listener))


class _Listener(socket.socket):
    """Takes connections as long as there are few, and ends each after its time.

    That is before a handshake, too, and where a client does not read.
    """

    def __init__(self, family: socket.AddressFamily) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._taken: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; ConnectionAbortedError for one that is too many."""
        connection, address = super().accept()
        self._taken = [one for one in self._taken if one.fileno() != -1]  # the others are closed
        if len(self._taken) >= _MOST:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        self._taken.append(connection)
        asyncio.get_running_loop().call_later(_SECONDS, _cut_off, connection)
        return connection, address


def _cut_off(connection: socket.socket) -> None:
    """Shut a connection down, in both directions."""
    with contextlib.suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)
