"""Answers the protocol's calls with the engines of one worker."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from grpc import aio
from tokenweir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    common_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prediction_service_pb2,
    prediction_service_pb2_grpc,
)

from engine.config import RequestLimits
from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.one_pass.prediction import Prediction
from engine.requests.checks import raise_if_any
from engine.requests.events import (
    Admitted,
    GenerationEvent,
    RequestFinished,
    SequenceFinished,
    TextDelta,
)
from engine.requests.request import GenerationRequest
from server.api import API_MINOR, REPLICA_KEY
from server.interceptors import current_request_id
from server.worker import answers
from server.worker import requests as convert
from server.worker.admission import AdmissionInterceptor
from server.worker.catalog import Catalog, GeneratingEngine
from server.worker.deltas import gathered
from server.worker.generation_answers import FinishedInput, GenerationAnswers

Context = aio.ServicerContext[Any, Any]
T = TypeVar("T")

# Ending a call this much before its client does lets the answer say where the time went.
_DEADLINE_MARGIN_SHARE = 0.1
_MAX_DEADLINE_MARGIN = 0.05  # seconds


class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Generate, GenerateStream and Score."""

    def __init__(self, catalog: Catalog, limits: RequestLimits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._numbers = itertools.count(1)

    async def Generate(
        self, request: generation_service_pb2.GenerateRequest, context: Context
    ) -> generation_service_pb2.GenerateResponse:
        """Answer all inputs, in order; one that fails fails the call and aborts the others."""
        engine, inputs = self._prepare(request, context)
        results = await _all_of([_generate(engine, one) for one in inputs])
        return self._answering(request, engine).response(results)

    async def GenerateStream(
        self, request: generation_service_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Yield the increments of one input."""
        tokens_per_message = convert.check_stream_request(request)
        try:
            engine, (one,) = self._prepare(request.request, context)
            events = gathered(engine.generate(one), tokens_per_message)
            answering = self._answering(request.request, engine)
            async with aclosing(self._messages(events, answering, context)) as messages:
                number = 0
                async for message in messages:
                    number += 1
                    message.sequence_number = number
                    yield message
        except (InvalidRequest, CapabilityNotSupported) as error:
            raise convert.nested("request", error) from error

    async def Score(
        self, request: generation_service_pb2.ScoreRequest, context: Context
    ) -> generation_service_pb2.ScoreResponse:
        """Answer all inputs, in order; one that fails fails the call and cancels the others."""
        engine = self._catalog.scoring(request.model, request.model_version)
        inputs = convert.score_requests(
            request,
            manifest=engine.package.manifest,
            limits=self._limits,
            request_ids=self._engine_ids(),
            deadline=_deadline(context),
        )
        scores = await _all_of([engine.score(one) for one in inputs])
        answering = GenerationAnswers(
            self._catalog.served(request.model), current_request_id(), engine.token_bytes
        )
        return answering.score_response(scores)

    def _prepare(
        self, request: generation_service_pb2.GenerateRequest, context: Context
    ) -> tuple[GeneratingEngine, list[GenerationRequest]]:
        engine = self._catalog.generating(request.model, request.model_version)
        inputs = convert.generation_requests(
            request,
            manifest=engine.package.manifest,
            capabilities=engine.capabilities,
            limits=self._limits,
            request_ids=self._engine_ids(),
            deadline=_deadline(context),
        )
        return engine, inputs

    def _engine_ids(self) -> Iterator[str]:
        # A client may send one id twice; the engine's names must not collide.
        return (f"{current_request_id()}#{number}" for number in self._numbers)

    def _answering(
        self, request: generation_service_pb2.GenerateRequest, engine: GeneratingEngine
    ) -> GenerationAnswers:
        determinism = request.scheduling.determinism
        return GenerationAnswers(
            self._catalog.served(request.model),
            current_request_id(),
            engine.token_bytes,
            with_ids=request.output.token_ids,
            may_vary=determinism == common_pb2.DETERMINISM_BEST_EFFORT,
        )

    async def _messages(
        self,
        events: AsyncGenerator[GenerationEvent, None],
        answering: GenerationAnswers,
        context: Context,
    ) -> AsyncGenerator[generation_service_pb2.GenerateStreamResponse, None]:
        async with aclosing(events):
            async for event in events:
                match event:
                    case Admitted():
                        await context.send_initial_metadata(
                            ((REPLICA_KEY, self._catalog.replica_id),)
                        )
                    case TextDelta():
                        if (message := answering.delta(event)) is not None:
                            yield message
                    case SequenceFinished():
                        yield answering.finished(event)
                    case RequestFinished():
                        yield answering.summary(event)


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Classify, Label and Embed."""

    def __init__(self, catalog: Catalog, limits: RequestLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    async def Classify(
        self, request: prediction_service_pb2.ClassifyRequest, context: Context
    ) -> prediction_service_pb2.ClassifyResponse:
        """Return the best classes of every item."""
        top = request.top if request.HasField("top") else None
        if top is not None and top < 0:
            raise_if_any([FieldViolation("top", f"{top} is below 0; 0 means all")])
        prediction = await self._predict("classify", request, context)
        labels = self._catalog.engines[request.model].package.manifest.labels
        return prediction_service_pb2.ClassifyResponse(
            results=[answers.classes(item, labels, top) for item in prediction.items],
            usage=answers.prediction_usage(prediction.items),
            timing=answers.timing([prediction.timing]),
            provenance=answers.provenance(self._catalog.served(request.model)),
        )

    async def Label(
        self, request: prediction_service_pb2.LabelRequest, context: Context
    ) -> prediction_service_pb2.LabelResponse:
        """Return the label of every token of every item."""
        prediction = await self._predict("label", request, context)
        labels = self._catalog.engines[request.model].package.manifest.labels
        return prediction_service_pb2.LabelResponse(
            results=[answers.spans(item, labels) for item in prediction.items],
            usage=answers.prediction_usage(prediction.items),
            timing=answers.timing([prediction.timing]),
            provenance=answers.provenance(self._catalog.served(request.model)),
        )

    async def Embed(
        self, request: prediction_service_pb2.EmbedRequest, context: Context
    ) -> prediction_service_pb2.EmbedResponse:
        """Return the vector of every item."""
        prediction = await self._predict("embed", request, context)
        return prediction_service_pb2.EmbedResponse(
            vectors=[
                answers.vector(item, normalize=request.normalize) for item in prediction.items
            ],
            usage=answers.prediction_usage(prediction.items),
            timing=answers.timing([prediction.timing]),
            provenance=answers.provenance(self._catalog.served(request.model)),
        )

    async def _predict(
        self,
        capability: str,
        request: prediction_service_pb2.ClassifyRequest
        | prediction_service_pb2.LabelRequest
        | prediction_service_pb2.EmbedRequest,
        context: Context,
    ) -> Prediction:
        engine = self._catalog.predicting(request.model, request.model_version, capability)
        items = convert.prediction_items(request.items, request.request_id, self._limits)
        return await engine.predict(
            items, request_id=current_request_id(), deadline=_deadline(context)
        )


@dataclass(frozen=True)
class ServerFacts:
    """What GetServerInfo and ListModels say of the process."""

    version: str
    start_time: datetime  # with a time zone
    features: tuple[str, ...]
    limits: RequestLimits
    max_request_bytes: int


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """What is served here, and how busy it is."""

    def __init__(
        self, catalog: Catalog, facts: ServerFacts, admission: AdmissionInterceptor
    ) -> None:
        self._catalog = catalog
        self._facts = facts
        self._admission = admission

    async def GetServerInfo(
        self, request: admin_service_pb2.GetServerInfoRequest, context: Context
    ) -> admin_service_pb2.GetServerInfoResponse:
        """Return what this server is."""
        response = admin_service_pb2.GetServerInfoResponse(
            version=self._facts.version,
            api_minor=API_MINOR,
            instance_id=self._catalog.replica_id,
            features=self._facts.features,
        )
        response.start_time.FromDatetime(self._facts.start_time)
        return response

    async def ListModels(
        self, request: admin_service_pb2.ListModelsRequest, context: Context
    ) -> admin_service_pb2.ListModelsResponse:
        """Return the models by name; a page token is the last name of the page before."""
        if request.page_size < 0:
            raise_if_any(
                [FieldViolation("page_size", f"{request.page_size} is below 0; 0 means all")]
            )
        names = [name for name in self._catalog.engines if name > request.page_token]
        page = names[: request.page_size or None]
        return admin_service_pb2.ListModelsResponse(
            models=[self._model_info(name) for name in page],
            next_page_token=page[-1] if len(page) < len(names) else "",
        )

    async def GetLoad(
        self, request: admin_service_pb2.GetLoadRequest, context: Context
    ) -> admin_service_pb2.GetLoadResponse:
        """Return how busy every model is."""
        return admin_service_pb2.GetLoadResponse(
            replicas=[
                answers.replica_load(engine.load(), model=name, replica_id=self._catalog.replica_id)
                for name, engine in self._catalog.engines.items()
            ]
        )

    async def LoadModel(
        self, request: admin_service_pb2.LoadModelRequest, context: Context
    ) -> admin_service_pb2.LoadModelResponse:
        """Refuse: models are loaded at start."""
        raise _not_there("LoadModel")

    async def UnloadModel(
        self, request: admin_service_pb2.UnloadModelRequest, context: Context
    ) -> admin_service_pb2.UnloadModelResponse:
        """Refuse: models are unloaded at the end."""
        raise _not_there("UnloadModel")

    async def AbortRequests(
        self, request: admin_service_pb2.AbortRequestsRequest, context: Context
    ) -> admin_service_pb2.AbortRequestsResponse:
        """Refuse: a request is aborted by cancelling its call."""
        raise _not_there("AbortRequests")

    async def Drain(
        self, request: admin_service_pb2.DrainRequest, context: Context
    ) -> admin_service_pb2.DrainResponse:
        """Refuse: a worker drains when it is stopped."""
        raise _not_there("Drain")

    def _model_info(self, name: str) -> admin_service_pb2.ModelInfo:
        state, message = self._state(name)
        return answers.model_info(
            self._catalog.served(name),
            state=state,
            message=message,
            limits=self._facts.limits,
            max_request_bytes=self._facts.max_request_bytes,
        )

    def _state(self, name: str) -> tuple[admin_service_pb2.ModelState.ValueType, str]:
        engine = self._catalog.engines[name]
        if engine.is_warming:
            return admin_service_pb2.MODEL_STATE_WARMING, ""
        if not engine.healthy:
            return admin_service_pb2.MODEL_STATE_FAILED, "the engine reports itself unhealthy"
        if self._admission.draining:
            return admin_service_pb2.MODEL_STATE_DRAINING, ""
        return admin_service_pb2.MODEL_STATE_READY, ""


def _deadline(context: Context) -> float | None:
    """Return when the engine must end the call, on the monotonic clock; None: never."""
    remaining: float | None = context.time_remaining()  # the stubs know no call without one
    if remaining is None:
        return None
    margin = min(_MAX_DEADLINE_MARGIN, remaining * _DEADLINE_MARGIN_SHARE)
    return time.monotonic() + remaining - margin


async def _all_of(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all requests at once; raise what the first to fail raised, the others then aborted."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _raise_all_violations([task for task in tasks if task in done])
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _generate(engine: GeneratingEngine, request: GenerationRequest) -> FinishedInput:
    sequences: list[SequenceFinished] = []
    # Closing the engine's generator is what aborts the request.
    events: Any = engine.generate(request)
    async with aclosing(events):
        async for event in events:
            match event:
                case SequenceFinished():
                    sequences.append(event)
                case RequestFinished():
                    sequences.sort(key=lambda sequence: sequence.index)
                    return FinishedInput(tuple(sequences), event)
    raise RuntimeError(f"the engine ended request {request.request_id} without RequestFinished")


def _raise_all_violations(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Raise the first error; where inputs are invalid, one that names everything of all inputs."""
    errors = [error for task in tasks if (error := task.exception()) is not None]
    violations = [v for e in errors if isinstance(e, InvalidRequest) for v in e.violations]
    raise_if_any(list(dict.fromkeys(violations)))
    if errors:
        raise errors[0]


def _not_there(method: str) -> CapabilityNotSupported:
    return CapabilityNotSupported(f"{method} is not in this version of the server", [method])
