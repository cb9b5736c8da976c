"""Ranks and classes of texts, and the list of models, as Infinity answers them."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenweir import AsyncClient, ModelInfo, PredictOptions, Usage

from server.adapters.http.calls import Calls
from server.adapters.http.errors import HttpError
from server.adapters.http.requests import MAX_INPUTS, Json, RequestOfOneModel

_ANY_MODEL = "default/not-specified"  # what its client sends for none
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class _Request(RequestOfOneModel):
    capability = "classify"

    truncate: bool | None = None

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        return "" if model == _ANY_MODEL else model

    @property
    def num_inputs(self) -> int:
        """As the base's."""
        return len(getattr(self, self.input_field))

    def options(self, request_id: str) -> PredictOptions:
        """Return the options of our client."""
        return {"truncate": "right" if self.truncate else None, "request_id": request_id}


class ClassifyRequest(_Request):
    """The body of `/classify`."""

    input_field, id_prefix = "input", "classify-"

    input: _Texts


class RerankRequest(_Request):
    """The body of `/rerank`, which is Cohere's as well."""

    input_field, id_prefix = "documents", "rerank-"

    query: str
    documents: _Texts
    return_documents: bool | None = None
    top_n: Annotated[int, Field(gt=0)] | None = None


def routes(calls: Calls) -> list[Route]:
    """Return the routes of the protocol; vectors are OpenAI's."""

    async def models(request: Request) -> Response:
        found = await calls.caller(request).models()
        data = [{"id": one.model, "capabilities": one.capabilities, "stats": {}} for one in found]
        return JSONResponse({"object": "list", "data": data})

    ranks = calls.endpoint(RerankRequest, rerank)
    return [
        Route("/classify", calls.endpoint(ClassifyRequest, classify), methods=["POST"]),
        Route("/rerank", ranks, methods=["POST"]),
        Route("/v1/rerank", ranks, methods=["POST"]),  # as Jina and other servers call it
        Route("/models", models, methods=["GET"]),
    ]


async def classify(client: AsyncClient, asked: ClassifyRequest, request_id: str) -> Json:
    """Return the classes of texts, best first."""
    model = await asked.found(client)
    options = asked.options(request_id)
    found = await client.classify_many(model.model, asked.input, top=0, **options)
    data = [[{"score": one.probability, "label": one.label} for one in each] for each in found]
    return _envelope("classify", model, request_id, found.usage) | {"data": data}


async def rerank(client: AsyncClient, asked: RerankRequest, request_id: str) -> Json:
    """Return the documents that answer a query best; HttpError for a model of other classes."""
    model = await asked.found(client)
    if len(model.labels) != 1:
        message = f"{model.model} has {len(model.labels)} classes; to rank takes a model of one"
        raise HttpError(400, message, param="model")
    pairs = [(asked.query, document) for document in asked.documents]
    found = await client.classify_many(model.model, pairs, top=0, **asked.options(request_id))
    ranked = sorted(enumerate(found), key=lambda one: -one[1][0].probability)
    results: list[Json] = [
        {"index": index, "relevance_score": labels[0].probability}
        for index, labels in ranked[: asked.top_n]
    ]
    if asked.return_documents:
        results = [one | {"document": asked.documents[one["index"]]} for one in results]
    return _envelope("rerank", model, request_id, found.usage) | {"results": results}


def _envelope(kind: str, model: ModelInfo, request_id: str, usage: Usage) -> Json:
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model.model,
        "usage": {"prompt_tokens": usage.input_tokens, "total_tokens": usage.input_tokens},
    }
