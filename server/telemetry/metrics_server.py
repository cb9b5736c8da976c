"""The HTTP server of the metrics page: a thread a request, so many at once, each for so long.

It runs in the process of the gateway, so whoever connects and says nothing must cost little there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from server.hosts import family_of
from server.identity.certificate import Certificate

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]  # WSGI
logger = logging.getLogger(__name__)

_MOST = 32  # requests at once
_SECONDS = 10.0  # per request


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers in threads of its own from the start on, until `end`."""

    daemon_threads = True
    request_queue_size = _MOST

    def __init__(self, host: str, port: int, app: App, certificate: Certificate | None) -> None:
        """Listen, encrypted where there is a certificate; OSError if nobody can."""
        self._certificate = certificate
        self._open: dict[socket.socket, float] = {}  # requests, and since when
        self.address_family = family_of(host)
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection, of which nothing has been read."""
        connection, address = super().get_request()
        if self._certificate is not None:  # its handshake is for the thread of the request
            context = self._certificate.context
            connection = context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; close a connection that is one too many."""
        if len(self._open) >= _MOST:
            return self.shutdown_request(request)
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: read renewed files, and end what takes too long."""
        if self._certificate is not None:
            self._certificate.look()
        now = time.monotonic()
        for connection, since in tuple(self._open.items()):
            if now - since > _SECONDS:
                _cut_off(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say little of what clients do: they may do it often."""
        logger.debug("a request for metrics has failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _cut_off(connection: socket.socket) -> None:
    """Have whoever reads from a connection meet its end; not by ssl, which is another thread's."""
    with contextlib.suppress(OSError):  # it has gone already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
