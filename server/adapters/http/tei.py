"""Vectors and classes of texts, as text-embeddings-inference (TEI) answers them."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any, Literal

from pydantic import PlainValidator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenweir import AsyncClient, Item, ModelInfo, PredictOptions, Truncate

from server.adapters.config import HttpConfig
from server.adapters.http.calls import Calls
from server.adapters.http.errors import unknown_model
from server.adapters.http.requests import MAX_INPUTS, Json, Prompts, RequestOfOneModel


def _texts_or_pairs(value: object) -> Json:
    """Return what is to be classified as TEI has it: a list of two texts is a pair, not a batch."""
    match value:
        case str() | [str()] | [str(), str()]:
            return {"is_single": True, "items": [_item(value)]}
        case list() if len(value) > MAX_INPUTS:
            raise ValueError(f"{len(value):,} are more than {MAX_INPUTS:,}; send fewer")
        case list() if value:
            return {"is_single": False, "items": [_item(one) for one in value]}
    raise ValueError(_FORMS)


def _item(value: object) -> Item:
    match value:
        case str(text) | [str(text)]:
            return text
        case [str(text), str(second)]:
            return text, second
    raise ValueError(_FORMS)


_FORMS = "give a text, a pair of texts [a, b], or a list of [a] and [a, b]"


class TeiRequest(RequestOfOneModel):
    """The options that both requests have."""

    input_field = "inputs"

    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    def options(self, request_id: str) -> PredictOptions:
        """Return the options of our client."""
        side: Truncate = "left" if self.truncation_direction in ("Left", "left") else "right"
        return {"truncate": side if self.truncate else None, "request_id": request_id}


class EmbedRequest(TeiRequest):
    """The body of `/embed`."""

    capability, id_prefix = "embed", "embd-"

    inputs: Prompts
    normalize: bool | None = None  # absent: to length 1
    prompt_name: str | None = None

    @property
    def num_inputs(self) -> int:
        """As the base's."""
        return len(self.inputs)


class PredictRequest(TeiRequest):
    """The body of `/predict`."""

    capability, id_prefix = "classify", "pred-"

    inputs: Annotated[dict[str, Any], PlainValidator(_texts_or_pairs)]


def routes(calls: Calls, config: HttpConfig) -> list[Route]:
    """Return the routes of the protocol."""

    async def info(request: Request) -> Response:
        models = await calls.caller(request).models()
        for capability in ("embed", "classify"):
            for model in models:
                if model.capabilities[0] == capability:
                    return JSONResponse(_info(model, config.max_requests))
        raise unknown_model("", "embed or classify")

    vectors = calls.endpoint(EmbedRequest, embed)
    return [
        Route("/embed", vectors, methods=["POST"]),
        Route("/", vectors, methods=["POST"]),  # as Hugging Face's clients call it
        Route("/predict", calls.endpoint(PredictRequest, predict), methods=["POST"]),
        Route("/info", info, methods=["GET"]),
    ]


async def embed(
    client: AsyncClient, asked: EmbedRequest, request_id: str
) -> list[tuple[float, ...]]:
    """Return the vectors of texts."""
    model = await asked.found(client)
    found = await client.embed_many(
        model.model,
        asked.inputs,
        normalize=asked.normalize is not False,
        prompt_name=asked.prompt_name,
        **asked.options(request_id),
    )
    return list(found.results)


async def predict(client: AsyncClient, asked: PredictRequest, request_id: str) -> list[Any]:
    """Return the classes of a text or a pair, best first, or those of each in a list."""
    model, options = await asked.found(client), asked.options(request_id)
    answers = await client.classify_many(model.model, asked.inputs["items"], top=0, **options)
    found = [
        [{"score": one.probability, "label": one.label} for one in labels]
        for labels in answers.results
    ]
    return found[0] if asked.inputs["is_single"] else found


def _info(model: ModelInfo, max_requests: int) -> Json:
    ids = {label: place for place, label in enumerate(model.labels)}
    classes = {"id2label": {str(place): label for label, place in ids.items()}, "label2id": ids}
    is_classifier = model.capabilities[0] == "classify"
    return {
        "model_id": model.model,
        "model_sha": model.manifest_sha256,
        "model_dtype": {"fp32": "float32", "fp16": "float16"}.get(model.precision, model.precision),
        "model_type": {"classifier": classes} if is_classifier else {"embedding": {}},
        "max_concurrent_requests": max_requests,
        "max_input_length": model.limits.max_input_tokens,
        "max_client_batch_size": model.limits.max_inputs,
        "version": metadata.version("tokenweir"),
    }
