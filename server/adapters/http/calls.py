"""The parts that endpoints share: on whose behalf they call, what is asked, answers in JSON."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenweir import AsyncClient, ModelInfo

from server.adapters.caller import client_as
from server.adapters.config import HttpConfig
from server.adapters.http.body import parsed
from server.adapters.http.errors import HttpError, refused_arguments
from server.adapters.http.gone import unless_gone
from server.adapters.http.requests import ModelRequest, RequestOfOneModel
from server.http_server import CERTIFIED

RequestT = TypeVar("RequestT", bound=ModelRequest)
OneModelT = TypeVar("OneModelT", bound=RequestOfOneModel)
Endpoint = Callable[[Request], Awaitable[Response]]
Answer = Coroutine[Any, Any, object]  # what becomes JSON
REQUEST_ID = "x-request-id"
_MAX_ID = 128  # characters


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
        self, kind: type[RequestT], answer: Callable[[AsyncClient, RequestT, str], Answer]
    ) -> Endpoint:
        """Return an endpoint that answers a kind of request; `answer` gets its id, too."""

        async def answered(request: Request) -> Response:
            asked, client = await self.asked(request, kind), self.caller(request)
            return await _answered(request, asked, answer(client, asked, _id(request)))

        return answered

    def endpoint_of_model(
        self,
        kind: type[OneModelT],
        answer: Callable[[AsyncClient, ModelInfo, OneModelT, str], Answer],
    ) -> Endpoint:
        """Return one for requests that need not name the model that answers."""

        async def answered(request: Request) -> Response:
            asked, client = await self.asked(request, kind), self.caller(request)
            models = await client.models()
            if (model := asked.found_in(models)) is None:
                raise unknown_model(asked.model, asked.capability, models)
            return await _answered(request, asked, answer(client, model, asked, _id(request)))

        return answered


def unknown_model(
    name: str, capability: str = "do that", models: Iterable[ModelInfo] = ()
) -> HttpError:
    """Return the answer where no model has a name, "" for any, or can do what is asked."""
    if any(one.model == name for one in models):
        message = f"model {name} cannot {capability}; take another, /v1/models lists them"
        return HttpError(400, message, param="model", code="capability_not_supported")
    which = f"no model {name!r:.300} is served here" if name else f"no model here can {capability}"
    message = f"{which}; /v1/models lists them"
    return HttpError(404, message, kind="not_found_error", code="model_not_found")


async def _answered(request: Request, asked: ModelRequest, answer: Answer) -> Response:
    with refused_arguments(asked.as_sent):
        found = await unless_gone(request, answer)
    return JSONResponse(found, headers={REQUEST_ID: _id(request)})


def _id(request: Request) -> str:
    return str(request.state.request_id)


def _is_id(given: str) -> bool:
    return 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
