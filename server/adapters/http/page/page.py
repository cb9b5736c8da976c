"""The page for people: models to try, and load; one file, and the JSON that it asks for."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from dataclasses import asdict
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from tokenweir import AsyncClient

from server.adapters.caller import is_serving
from server.adapters.http.calls import Calls
from server.adapters.http.counts import Counts
from server.adapters.http.errors import HttpError
from server.adapters.http.page.load_history import LoadHistory
from server.adapters.http.page.predictions import PredictionRequest, predict

_FILE = Path(__file__).with_name("page.html")
_NEVER_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_NO_ADMIN = (
    "The load is not known here: start “tokenweir http” with --admin HOST:PORT, the server's admin "
    "port."
)


class Page:
    """Answers `/`, and what its script asks for."""

    def __init__(
        self,
        client: AsyncClient,
        calls: Calls,
        history: LoadHistory | None,
        counts: Counts,
        admin_token: str | None,
    ) -> None:
        """The page says if it has no `history`; readers show the `admin_token`, if any."""
        self._client, self._calls, self._counts = client, calls, counts
        self._history, self._token = history, admin_token
        self._html = _FILE.read_text(encoding="utf-8")
        self._headers = {
            **_NEVER_KEPT,
            "Content-Security-Policy": _policy(self._html),
            "Referrer-Policy": "no-referrer",
        }

    @property
    def routes(self) -> list[Route]:
        """The routes of the page and of its data."""
        get, tried = ["GET"], self._calls.endpoint(PredictionRequest, predict)
        return [
            Route("/", self.page, methods=get),
            Route("/page/models", self.models, methods=get),
            Route("/page/load", self.load, methods=get),
            Route("/page/predict", tried, methods=["POST"]),
            Route("/metrics", self.metrics, methods=get),
        ]

    async def metrics(self, request: Request) -> Response:
        """Return counts of answers, for Prometheus, to those that may see the load."""
        await self._shown(request)
        return self._counts.page()

    async def page(self, request: Request) -> Response:
        """Return the page; it holds nothing of the server."""
        return HTMLResponse(self._html, headers=self._headers)

    async def models(self, request: Request) -> Response:
        """Return the models that the caller may list, with their certificates."""
        models = await self._calls.caller(request).models()
        listed = [asdict(model) | {"defaults": dict(model.defaults)} for model in models]
        health = "SERVING" if await is_serving(self._client) else "NOT_SERVING"
        found = {"health": health, "models": listed}
        return JSONResponse(found, headers=_NEVER_KEPT)

    async def load(self, request: Request) -> Response:
        """Return the load, now and of the last ten minutes, and the workers; or why not."""
        if self._history is None:
            return JSONResponse({"problem": _NO_ADMIN}, headers=_NEVER_KEPT)
        shown = await self._shown(request)
        found = {
            "time": time.time(),
            "problem": self._history.problem,
            "now": list(map(asdict, self._history.now(shown))),
            "history": list(map(asdict, self._history.moments(shown))),
            "workers": [
                asdict(worker) | {"start_time": worker.start_time.isoformat()}
                for worker in self._history.workers
            ],
        }
        return JSONResponse(found, headers=_NEVER_KEPT)

    async def _shown(self, request: Request) -> set[str] | None:
        """Return the models whose load is told, None for all.

        The token of the admin port shows all; HttpError without it. If this server has none, they
        are the models that the caller may list; TokenweirClientError if they cannot be listed.
        """
        if self._token is None:
            return {model.model for model in await self._calls.caller(request).models()}
        header = request.headers.get("authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
            message = "Workers and load are for operators: give the token of the admin port"
            raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
        return None


def _policy(html: str) -> str:
    """Return a policy that lets nothing run, look or load but what is in the page itself."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(html, 'script')}",
            f"style-src {_hash(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _hash(html: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
