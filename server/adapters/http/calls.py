"""The parts that endpoints share: on whose behalf they call, what is asked, answers in JSON."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenweir import AsyncClient

from server.adapters.caller import client_as
from server.adapters.config import HttpConfig
from server.adapters.http.body import parsed
from server.adapters.http.errors import HttpError, refused_arguments
from server.adapters.http.requests import ModelRequest
from server.http_server import CERTIFIED

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=ModelRequest)
REQUEST_ID = "x-request-id"
_MAX_ID = 128  # characters
_CLIENT_GONE = 499  # nobody reads it


class Calls:
    """Reads requests, and answers them by calls of the server behind."""

    def __init__(self, client: AsyncClient, config: HttpConfig) -> None:
        self._client, self._config = client, config

    def caller(self, request: Request) -> AsyncClient:
        """Return a client that calls on behalf of the sender of the request."""
        return client_as(self._client, request.headers, getattr(request.state, CERTIFIED, None))

    async def asked(self, request: Request, kind: type[RequestT]) -> RequestT:
        """Return the body of a request, which has an id in every answer from now on.

        That is the one that its client gives it, in a header or the body, or another one.
        """
        header = request.headers.get(REQUEST_ID, "")
        is_good = _is_id(header)
        request.state.request_id = header if is_good else kind.id_prefix + uuid.uuid4().hex
        asked = await parsed(request, kind, self._config)
        if not is_good and asked.request_id and _is_id(asked.request_id):
            request.state.request_id = asked.request_id
        request.state.as_sent = asked.as_sent
        return asked

    def endpoint(
        self,
        kind: type[RequestT],
        answer: Callable[[AsyncClient, RequestT, str], Coroutine[Any, Any, object]],
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers a kind of request; `answer` gets its id, too."""

        async def answered(request: Request) -> Response:
            asked, client = await self.asked(request, kind), self.caller(request)
            request_id = request.state.request_id
            with refused_arguments(asked.as_sent):
                found = await unless_gone(request, answer(client, asked, request_id))
            return JSONResponse(found, headers={REQUEST_ID: request_id})

        return answered


def _is_id(given: str) -> bool:
    return 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()


async def unless_gone(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Return what a call of the server returns; end it as soon as the caller is gone."""
    work, gone = asyncio.create_task(call), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise HttpError(_CLIENT_GONE, "the client has gone")
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
