"""Answers Classify, Label and Embed with the engines of one worker."""

from __future__ import annotations

from collections.abc import Mapping

from tokenweir.v1 import prediction_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2_grpc

from engine.config import RequestLimits
from engine.errors import FieldViolation
from engine.one_pass.prediction import Prediction
from engine.requests.checks import raise_if_any
from engine.requests.events import Usage
from server.local_services import Context, current_request_id
from server.wire.record import current_record
from server.worker import prediction_answers as answers
from server.worker import requests
from server.worker.answers import ServedModel, provenance, timing
from server.worker.call_record import answered
from server.worker.catalog import Catalog
from server.worker.deadline import engine_deadline
from server.worker.entities import Strategy

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
        manifest = model.package.manifest
        return pb.ClassifyResponse(
            results=[
                answers.classes(item, manifest.labels, top, manifest.label_scores)
                for item in prediction.items
            ],
            usage=answers.prediction_usage(prediction.items),
            timing=timing([prediction.timing]),
            provenance=provenance(model),
            request_id=current_request_id(),
        )

    async def Label(self, request: pb.LabelRequest, context: Context) -> pb.LabelResponse:
        """Return the label of every token of every item, or its entities."""
        if (aggregation := request.aggregation) not in _STRATEGIES:
            what = f"{aggregation} is none of {[*_STRATEGIES]}"
            raise_if_any([FieldViolation("aggregation", what)])
        strategy = _STRATEGIES[aggregation]
        model, prediction = await self._predict("label", request, context)
        labels = model.package.manifest.labels
        return pb.LabelResponse(
            results=[answers.spans(item, labels, strategy) for item in prediction.items],
            usage=answers.prediction_usage(prediction.items),
            timing=timing([prediction.timing]),
            provenance=provenance(model),
            request_id=current_request_id(),
        )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the vector of every item."""
        model, prediction = await self._predict("embed", request, context)
        return pb.EmbedResponse(
            vectors=[
                answers.vector(item, normalize=request.normalize) for item in prediction.items
            ],
            usage=answers.prediction_usage(prediction.items),
            timing=timing([prediction.timing]),
            provenance=provenance(model),
            request_id=current_request_id(),
        )

    async def _predict(
        self,
        capability: str,
        request: requests.PredictionRequest,
        context: Context,
    ) -> tuple[ServedModel, Prediction]:
        record = current_record()
        record.model = self._catalog.known(request.model)
        found = self._catalog.predicting(request.model, request.model_version, capability)
        items = requests.prediction_items(request, self._limits)
        prediction = await found.engine.predict(
            items, request_id=current_request_id(), deadline=engine_deadline(context)
        )
        tokens = sum(item.input_tokens for item in prediction.items)
        answered(record, Usage(tokens, output_tokens=0), prediction.timing)
        return found.model, prediction
