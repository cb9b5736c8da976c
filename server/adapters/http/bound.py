"""Refuses requests beyond as many as may be open at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.adapters.http.errors import HttpError

_HEALTH = ("/health", "/v2/health/live", "/v2/health/ready")


class Bound:
    """ASGI middleware; health is never refused."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app, self._max = app, max_requests
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _HEALTH:
            await self._app(scope, receive, send)
            return
        if self._open >= self._max:
            message = f"{self._open} requests are open, as many as are taken at once"
            refusal = HttpError(503, message, kind="server_error", retry_after=1)
            await refusal.response(scope["path"])(scope, receive, send)
            return
        self._open += 1
        is_open = True

        async def send_on(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._open -= is_open  # before the client, which has all then, can ask again
                is_open = False
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._open -= is_open
