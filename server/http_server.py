"""The HTTP server under OpenAI's protocol, the page and the metrics: uvicorn, with bounds.

Its connections end where a request does not come, or has no end. uvicorn waits for a head as long
as the client likes, and one of its parsers keeps any length of it, and of what may stand behind a
body. To a client that says nothing, asyncio says goodbye by TLS for half a minute, and a server
that ends waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from server.auth.certified import certified_name
from server.settings import Http

CERTIFIED = "certified"  # in the state of a request: the name on the certificate of its client
_Parser: Any = AutoHTTPProtocol  # httptools' if that is installed, else h11's
_GOODBYE = 1.0  # seconds for the other side to close too
_FRAMES = 8  # times as long as a body may be what comes on the wire, in chunks of a byte each


class HttpServer(uvicorn.Server):
    """Answers by an ASGI application at one socket; `serve_at` runs until `should_exit` is set."""

    def __init__(
        self,
        app: Any,
        bounds: Http,
        tls: ssl.SSLContext | None,
        headers: Sequence[tuple[str, str]] = (),
        *,
        grace: float,
    ) -> None:
        """Encrypt by `tls`, if it is given; every answer has the headers, too.

        Open requests have `grace` seconds when the server ends. The time of a body is limited by
        its reader.
        """
        config = uvicorn.Config(
            app,
            http=bounded(bounds),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=list(headers),
            timeout_keep_alive=bounds.keep_alive_seconds,  # type: ignore[arg-type]  # asyncio's
            timeout_graceful_shutdown=grace,  # type: ignore[arg-type]  # likewise
        )
        super().__init__(config)
        config.load()
        config.ssl = tls

    async def serve_at(self, listener: socket.socket) -> None:
        """Answer whoever connects."""
        await self.serve(sockets=[listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command."""
        yield


def bounded(bounds: Http, parser: Any = _Parser) -> type[asyncio.Protocol]:
    """Return the protocol of connections whose requests are no longer than they may be."""
    return type("Bounded", (_Bounded, parser), {"bounds": bounds})


class _Bounded(asyncio.Protocol):
    """Limits beside one of uvicorn's protocols, which comes behind it."""

    bounds: Http
    transport: asyncio.Transport
    app_state: dict[str, Any]  # the state of every request
    cycle: Any  # the last request whose head has come, None before the first
    send_400_response: Callable[[str], None]
    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # received of a head, or behind one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio does so for sockets alone that name their protocol, which those here do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, CERTIFIED: certified_name(certificate)}
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
            return
        is_new = self._is_waiting and self._timer is None
        is_rest = before is not None and before.response_complete and before.more_body
        size = 0 if is_rest else len(data)  # the rest of a refused body
        self._num_bytes = size if is_new else self._num_bytes + size
        most = self.bounds.max_head_bytes
        if self._is_waiting:
            self._wait()
            if self._num_bytes > most:
                self.send_400_response(f"the head has more than {most:,} bytes")
        elif self._num_bytes > most + _FRAMES * self.bounds.max_body_bytes:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End an idle connection, because the server ends."""
        cast(Any, super()).shutdown()
        self._leave()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection behind an answer."""
        cast(Any, super()).timeout_keep_alive_handler()
        self._leave()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        if self.transport.is_closing():
            return False
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.bounds.head_seconds, self._end_late_one)

    def _stop_waiting(self) -> None:
        self._num_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late_one(self) -> None:
        self._timer = None
        if self._is_waiting:
            self.transport.close()
            self._leave()

    def _leave(self) -> None:
        """Do not wait long for the other side, if it has all that was sent."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_GOODBYE, self.transport.abort)
