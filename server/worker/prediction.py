"""Answers Classify, Label and Embed with the engines of one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenweir.v1 import common_pb2, prediction_service_pb2_grpc
from tokenweir.v1 import prediction_service_pb2 as pb

from engine.config import RequestLimits
from engine.errors import FieldViolation
from engine.one_pass.prediction import ItemPrediction, Prediction
from engine.one_pass.scores import SCORES, softmax
from engine.package.manifest import LabelScores
from engine.requests.checks import raise_if_any
from engine.requests.events import Usage
from server.calls.deadlines import engine_deadline
from server.local_services import Context, current_request_id
from server.wire.bearer import current_record
from server.worker import requests
from server.worker.answers import ServedModel, answered, provenance, timing
from server.worker.catalog import Catalog
from server.worker.engines import Engine, PredictingEngine
from server.worker.entities import Entity, Strategy, find_entities

_STRATEGIES: Mapping[int, Strategy | None] = {
    pb.AGGREGATION_UNSPECIFIED: None,
    pb.AGGREGATION_SIMPLE: "simple",
    pb.AGGREGATION_FIRST: "first",
    pb.AGGREGATION_AVERAGE: "average",
    pb.AGGREGATION_MAX: "max",
}


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Classify, Label and Embed."""

    def __init__(self, catalog: Catalog, limits: RequestLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Return the best classes of every item."""
        top = request.top if request.HasField("top") else None
        if top is not None and top < 0:
            raise_if_any([FieldViolation("top", f"{top} is below 0; 0 means all")])
        model, prediction = await self._predict("classify", request, context)
        manifest = model.engine.package.manifest
        return pb.ClassifyResponse(
            results=[
                classes(item, manifest.labels, top, manifest.label_scores)
                for item in prediction.items
            ],
            **_common(model, prediction),
        )

    async def Label(self, request: pb.LabelRequest, context: Context) -> pb.LabelResponse:
        """Return the label of every token of every item, or its entities."""
        if (aggregation := request.aggregation) not in _STRATEGIES:
            what = f"{aggregation} is none of {[*_STRATEGIES]}"
            raise_if_any([FieldViolation("aggregation", what)])
        strategy = _STRATEGIES[aggregation]
        model, prediction = await self._predict("label", request, context)
        labels = model.engine.package.manifest.labels
        return pb.LabelResponse(
            results=[spans(item, labels, strategy) for item in prediction.items],
            **_common(model, prediction),
        )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the vector of every item."""
        model, prediction = await self._predict("embed", request, context)
        return pb.EmbedResponse(
            vectors=[vector(item, normalize=request.normalize) for item in prediction.items],
            **_common(model, prediction),
        )

    async def _predict(
        self,
        capability: str,
        request: requests.PredictionRequest,
        context: Context,
    ) -> tuple[ServedModel[PredictingEngine], Prediction]:
        record = current_record()
        record.model = self._catalog.known(request.model)
        found = self._catalog.predicting(request.model, request.model_version, capability)
        items = requests.prediction_items(request, self._limits)
        prediction = await found.engine.predict(
            items, request_id=current_request_id(), deadline=engine_deadline(context)
        )
        tokens = sum(item.input_tokens for item in prediction.items)
        answered(record, Usage(tokens, output_tokens=0), prediction.timing)
        return found, prediction


def _common(model: ServedModel[Engine], prediction: Prediction) -> dict[str, Any]:
    """Return the fields that all answers have."""
    tokens = sum(item.input_tokens for item in prediction.items)
    return {
        "usage": common_pb2.Usage(input_tokens=tokens),
        "timing": timing([prediction.timing]),
        "provenance": provenance(model),
        "request_id": current_request_id(),
    }


def classes(
    item: ItemPrediction,
    labels: Sequence[str],
    top: int | None,
    scores: LabelScores = "softmax",
) -> pb.ClassifyResponse.Classes:
    """Return the `top` best classes, all for 0, the best one for None."""
    probabilities = SCORES[scores](item.logits)  # (num_labels,)
    count = 1 if top is None else top or len(probabilities)
    best = np.argsort(-probabilities, kind="stable")[:count]
    return pb.ClassifyResponse.Classes(
        labels=[_scored_label(int(i), float(probabilities[i]), labels) for i in best]
    )


def spans(
    item: ItemPrediction, labels: Sequence[str], strategy: Strategy | None = None
) -> pb.LabelResponse.Spans:
    """Return the best label of every token, or with a strategy the entities."""
    probabilities = softmax(item.logits)  # (num_tokens, num_labels)
    if strategy is not None:
        found = find_entities(probabilities, item.spans, item.continues, labels, strategy)
        return pb.LabelResponse.Spans(spans=map(_entity_span, found))
    best = probabilities.argmax(axis=-1)  # (num_tokens,)
    return pb.LabelResponse.Spans(
        spans=[
            pb.LabelResponse.Span(
                start_byte=start,
                end_byte=end,
                label=_scored_label(int(label), float(row[label]), labels),
            )
            for (start, end), row, label in zip(item.spans, probabilities, best, strict=True)
        ]
    )


def _entity_span(entity: Entity) -> pb.LabelResponse.Span:
    label = pb.ScoredLabel(label=entity.label, probability=entity.probability, index=entity.index)
    return pb.LabelResponse.Span(start_byte=entity.start, end_byte=entity.end, label=label)


def vector(item: ItemPrediction, *, normalize: bool) -> pb.EmbedResponse.Vector:
    """Return the embedding, of length 1 if asked for."""
    values = item.embedding.astype(np.float64)
    length = float(np.linalg.norm(values))
    if normalize and length > 0:
        values = values / length
    return pb.EmbedResponse.Vector(values=values.tolist())


def _scored_label(index: int, probability: float, labels: Sequence[str]) -> pb.ScoredLabel:
    name = labels[index] if index < len(labels) else str(index)
    return pb.ScoredLabel(label=name, probability=probability, index=index)
