"""The application behind the HTTP port: its routes, what stands around them, and its errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tokenweir import AsyncClient, TokenweirClientError

from server.adapters.config import HttpConfig
from server.adapters.http import infinity, tei
from server.adapters.http.calls import REQUEST_ID, Calls
from server.adapters.http.counts import Counting, Counts
from server.adapters.http.errors import HttpError, http_error
from server.adapters.http.kserve.endpoints import InferenceEndpoints
from server.adapters.http.openai.endpoints import OpenAiEndpoints
from server.adapters.http.page.load_history import LoadHistory
from server.adapters.http.page.page import Page
from server.adapters.kserve.errors import Refused

_HEALTH = ("/health", "/v2/health/live", "/v2/health/ready")
logger = logging.getLogger(__name__)


def application(
    client: AsyncClient, config: HttpConfig, history: LoadHistory | None = None
) -> Starlette:
    """Return the ASGI application that answers by a client of our server.

    `history` is what its page shows of workers and load.
    """
    calls, counts = Calls(client, config), Counts()
    routes = [
        *OpenAiEndpoints(client, calls, config).routes,
        *tei.routes(calls, config),
        *infinity.routes(calls),
        *InferenceEndpoints(client, calls, config).routes,
        *Page(client, calls, history, counts, config.admin_token).routes,
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Counting, counts=counts, routes=routes),
            *_for_pages(config.allowed_origins),
            Middleware(Bound, max_requests=config.max_requests),
        ],
        exception_handlers=dict.fromkeys(
            (HttpError, Refused, TokenweirClientError, HTTPException, Exception), _failed
        ),
    )


def _for_pages(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets pages of other origins ask, where some may."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    ]


async def _failed(request: Request, error: Exception) -> Response:
    """Return the answer of a failure, with the id of the request if it has one."""
    response = _http_error(request, error).response(request.url.path)
    if (request_id := getattr(request.state, "request_id", None)) is not None:
        response.headers[REQUEST_ID] = request_id
    return response


def _http_error(request: Request, error: Exception) -> HttpError:
    match error:
        case HttpError():
            return error
        case Refused():
            status = 404 if error.code is grpc.StatusCode.NOT_FOUND else 400
            return HttpError(status, str(error))
        case TokenweirClientError():
            if (known := error.metadata.get("request_id")) is not None:
                request.state.request_id = known  # the log's: of a stranger the server reads no id
            return http_error(error, getattr(request.state, "as_sent", str))
        case HTTPException():
            message = f"{request.method} {request.url.path}: {error.detail}"
            return HttpError(error.status_code, message)
    name = getattr(request.state, "request_id", "")
    logger.error("%s fails, request_id=%s; its traceback follows", request.url.path, name)
    return HttpError(500, "the server failed; its log says how", kind="server_error")


class Bound:
    """ASGI middleware that refuses requests beyond as many as may be open; health never."""

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
