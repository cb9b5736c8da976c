"""Predictions for the page: OpenAI's protocol has no classes, no labelled spans and no pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Base64Bytes
from tokenweir import Aggregation, AsyncClient, Classification, Embedding, Labelling

from server.adapters.http.requests import ModelRequest


class PredictionRequest(ModelRequest):
    """The body of `/page/predict`: one item."""

    input_field, id_prefix = "input", "pred-"

    task: Literal["classify", "label", "embed"]
    input: str | None = None
    image: Base64Bytes | None = None
    text_pair: str | None = None  # the passage to a query, for a reranker
    aggregation: Aggregation | None = None
    model_version: str | None = None

    def faults(self) -> Iterator[tuple[str, str]]:
        """As the base's, and unless there is one item."""
        yield from super().faults()
        if (self.input is None) == (self.image is None):
            yield "input", "input or image: give one of them, a text or a picture"
        elif self.task == "label" and self.input is None:
            yield "input", "input: give a text, pictures have no words to label"


async def predict(client: AsyncClient, asked: PredictionRequest, request_id: str) -> dict[str, Any]:
    """Return all classes of the item, best first, its labelled spans, or its vector."""
    item = asked.image if asked.input is None else asked.input
    assert item is not None, "the request has one of them"
    options: Any = {
        "model_version": asked.model_version,
        "text_pair": asked.text_pair,
        "request_id": request_id,
    }
    found: Classification | Labelling | Embedding
    if asked.task == "classify":
        found = await client.classify(asked.model, item, top=0, **options)
    elif asked.task == "label":
        assert isinstance(item, str), "pictures are refused"
        found = await client.label(asked.model, item, aggregation=asked.aggregation, **options)
    else:
        found = await client.embed(asked.model, item, normalize=True, **options)
    return {name: value for name, value in asdict(found).items() if name in _TOLD}


_TOLD = ("labels", "spans", "values", "usage")
