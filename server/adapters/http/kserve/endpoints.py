"""The endpoints of the Open Inference Protocol (KServe v2), below /v2."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenweir import AsyncClient

from server.adapters.config import HttpConfig
from server.adapters.http.body import read_body, validated
from server.adapters.http.calls import REQUEST_ID, Calls, unless_gone
from server.adapters.http.errors import HttpError
from server.adapters.http.kserve.tensors import InferBody, infer_answer, infer_request
from server.adapters.kserve.descriptions import (
    config_of,
    index_of,
    metadata_of,
    server_metadata,
)
from server.adapters.kserve.errors import as_sent
from server.adapters.kserve.inference import Inference
from server.adapters.kserve.requests import InferRequest

_JSON_SIZE = "Inference-Header-Content-Length"  # in a body that has bytes after its JSON
_NOT_READY = 400  # the protocol's


class _IndexBody(BaseModel):
    ready: bool = False


class InferenceEndpoints:
    """Answers the protocol's requests by calls of the server behind."""

    def __init__(self, client: AsyncClient, calls: Calls, config: HttpConfig) -> None:
        self._inference = Inference(client, config.timeout)
        self._caller, self._config = calls.caller, config

    @property
    def routes(self) -> list[Route]:
        """The routes of the protocol."""
        get, post = ["GET"], ["POST"]
        models = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        return [
            Route("/v2", self.server, methods=get),
            Route("/v2/health/live", self.live, methods=get),
            Route("/v2/health/ready", self.ready, methods=get),
            Route("/v2/repository/index", self.index, methods=post),
            Route("/v2/models/stats", self.statistics, methods=get),  # before a model of this name
            *(Route(model, self.model, methods=get) for model in models),
            *(Route(f"{model}/ready", self.model_ready, methods=get) for model in models),
            *(Route(f"{model}/config", self.model_config, methods=get) for model in models),
            *(Route(f"{model}/stats", self.statistics, methods=get) for model in models),
            *(Route(f"{model}/infer", self.infer, methods=post) for model in models),
        ]

    async def server(self, request: Request) -> Response:
        """Describe this server."""
        return JSONResponse(server_metadata())

    async def live(self, request: Request) -> Response:
        """Answer that this process is alive."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Return whether the server behind serves."""
        ready = await self._inference.is_serving()
        return JSONResponse({"ready": ready}, 200 if ready else _NOT_READY)

    async def index(self, request: Request) -> Response:
        """List the models."""
        body = await read_body(request, self._config)
        asked = validated(_IndexBody, body or b"{}")
        return JSONResponse(index_of(await self._caller(request).models(), ready=asked.ready))

    async def model(self, request: Request) -> Response:
        """Describe the inputs and outputs of a model, over all of its tasks."""
        found = await self._inference.model(self._caller(request), *_named(request))
        return JSONResponse(metadata_of(*found))

    async def model_ready(self, request: Request) -> Response:
        """Return whether a model serves, or one version of it."""
        name, version = _named(request)
        ready = await self._inference.is_ready(self._caller(request), name, version)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else _NOT_READY)

    async def model_config(self, request: Request) -> Response:
        """Describe how a model is called."""
        model, _ = await self._inference.model(self._caller(request), *_named(request))
        return JSONResponse(config_of(model))

    async def statistics(self, request: Request) -> Response:
        """Tell what models have done."""
        return JSONResponse(
            await self._inference.statistics(self._caller(request), *_named(request))
        )

    async def infer(self, request: Request) -> Response:
        """Run a model."""
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise HttpError(415, f"a body of {encoding[:40]} is not taken; send it as it is")
        body = await read_body(request, self._config)
        size = _json_size(request, len(body))
        name, version = _named(request)
        request.state.as_sent = as_sent

        def read() -> tuple[InferBody, InferRequest]:
            asked = validated(InferBody, body[:size])
            return asked, infer_request(asked, body[size:], name, version)

        asked, tensors = await asyncio.to_thread(read)  # there may be millions of numbers
        call = self._inference.infer(self._caller(request), tensors)
        found = await unless_gone(request, call)
        answer, behind = infer_answer(asked, name, found)
        headers = {REQUEST_ID: found.request_id, "Content-Type": "application/json"}
        if behind:
            headers |= {_JSON_SIZE: str(len(answer)), "Content-Type": "application/octet-stream"}
        return Response(answer + behind, headers=headers)


def _named(request: Request) -> tuple[str, str]:
    """Return the model of a path, and its version, "" for what is not in it."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _json_size(request: Request, most: int) -> int:
    if (said := request.headers.get(_JSON_SIZE)) is None:
        return most
    if not (said.isascii() and said.isdigit() and len(said) < 20 and int(said) <= most):
        raise HttpError(400, f"{_JSON_SIZE} is {said[:40]!r}; the body has {most:,} bytes")
    return int(said)
