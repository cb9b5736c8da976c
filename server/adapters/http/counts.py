"""Counts answers by route and status, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.telemetry.metrics import Metric

HTTP_REQUESTS = Metric("http_requests", "counter", ("route", "code"), "Answers of the HTTP server.")
_NAME = HTTP_REQUESTS.exported
_HEAD = f"# HELP {_NAME} {HTTP_REQUESTS.help}\n# TYPE {_NAME} counter\n"
_TYPE = "text/plain; version=0.0.4"


class Counts:
    """The number of answers so far."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, route: str, status: int) -> None:
        """Count an answer."""
        self._counts[route, status] += 1

    def page(self) -> PlainTextResponse:
        """Return what Prometheus reads."""
        lines = (
            f'{_NAME}{{route="{route}",code="{status}"}} {count}\n'
            for (route, status), count in sorted(self._counts.items())
        )
        return PlainTextResponse(_HEAD + "".join(lines), media_type=_TYPE)


class Counting:
    """ASGI middleware; a path that is no route is "other"."""

    def __init__(self, app: ASGIApp, counts: Counts, routes: Sequence[Route]) -> None:
        self._app, self._counts, self._routes = app, counts, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        found = (route.path for route in self._routes if route.path_regex.match(scope["path"]))
        route, status = next(found, "other"), 500  # if it ends without an answer

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._counts.add(route, status)
