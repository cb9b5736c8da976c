"""Answers Generate, GenerateStream and Score with the engines of one worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from tokenweir.v1 import common_pb2, generation_service_pb2_grpc
from tokenweir.v1 import generation_service_pb2 as pb

from engine.config import RequestLimits
from engine.errors import InvalidRequest
from engine.requests.checks import raise_if_any
from engine.requests.events import (
    Admitted,
    GenerationEvent,
    RequestFinished,
    SequenceFinished,
    TextDelta,
)
from engine.requests.request import Deltas, GenerationRequest
from server.calls.deadlines import engine_deadline
from server.local_services import Context, current_request_id
from server.wire.bearer import current_record
from server.worker import requests
from server.worker.answers import ServedModel, answered, note
from server.worker.catalog import Catalog
from server.worker.checks import nested_in
from server.worker.engines import GeneratingEngine
from server.worker.generation_answers import FinishedInput, GenerationAnswers
from server.worker.known_options import KnownOptions

T = TypeVar("T")

# Seconds between two messages of a stream, and more of them for each that runs: nobody reads
# faster, and where there are many, their messages must not take the time of the model.
_PAUSE, _PAUSE_EACH = 0.002, 0.00008


class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Generate, GenerateStream and Score."""

    def __init__(self, catalog: Catalog, limits: RequestLimits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._numbers = itertools.count(1)
        self._known = KnownOptions()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Answer all inputs, in order; one that fails fails the call and aborts the others."""
        found, inputs = self._prepare(request, context)
        results = await _all_of([_generate(found.engine, one) for one in inputs])
        record = current_record()
        for result in results:
            for sequence in result.sequences:
                note(record, sequence)
            note(record, result.end)
        return _answering(request, found).response(results)

    async def GenerateStream(  # type: ignore[override]  # it writes: nothing is handed through
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        """Send the increments of one input."""
        tokens_per_message = requests.check_stream_request(request)
        seed = requests.seed_of_origin(request)
        with nested_in("request"):
            deltas = Deltas(tokens_per_message, _PAUSE, _PAUSE_EACH)
            found, (one,) = self._prepare(request.request, context, deltas, seed)
            answering = _answering(request.request, found)
            # Closing the engine's generator is what aborts the request.
            events: Any = found.engine.generate(one)
            async with aclosing(events):
                await _send(events, answering, one.params.seed, context)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Answer all inputs, in order; one that fails fails the call and cancels the others."""
        record = current_record()
        record.model = self._catalog.known(request.model)
        found = self._catalog.generating(request.model, request.model_version, "score")
        inputs = requests.score_requests(
            request,
            manifest=found.engine.package.manifest,
            capabilities=found.capabilities,
            limits=self._limits,
            request_ids=self._request_ids(),
            deadline=engine_deadline(context),
        )
        scores = await _all_of([found.engine.score(one) for one in inputs])
        for score in scores:
            answered(record, score.usage, score.timing)
        may_vary = _may_vary(request.scheduling)
        answering = GenerationAnswers(found, current_request_id(), may_vary=may_vary)
        return answering.score_response(scores)

    def _prepare(
        self,
        request: pb.GenerateRequest,
        context: Context,
        deltas: Deltas | None = None,
        seed: int | None = None,
    ) -> tuple[ServedModel[GeneratingEngine], list[GenerationRequest]]:
        current_record().model = self._catalog.known(request.model)
        found = self._catalog.generating(request.model, request.model_version)
        manifest = found.engine.package.manifest
        params = self._known.params(request, manifest, found.capabilities, self._limits)
        return found, requests.generation_requests(
            request,
            params,
            request_ids=self._request_ids(),
            deadline=engine_deadline(context),
            deltas=deltas,
            seed=seed,
        )

    def _request_ids(self) -> Iterator[str]:
        """Return names for the requests of a call to the engine; a client may send one id twice."""
        return (f"{current_request_id()}#{number}" for number in self._numbers)


def _answering(
    request: pb.GenerateRequest, model: ServedModel[GeneratingEngine]
) -> GenerationAnswers:
    return GenerationAnswers(
        model,
        current_request_id(),
        with_ids=request.output.token_ids,
        with_prompt_ids=request.output.prompt_tokens,
        may_vary=_may_vary(request.scheduling),
    )


def _may_vary(scheduling: pb.Scheduling) -> bool:
    return scheduling.determinism == common_pb2.DETERMINISM_BEST_EFFORT


async def _send(
    events: AsyncIterator[GenerationEvent],
    answering: GenerationAnswers,
    seed: int | None,
    context: Context,
) -> None:
    number, record, admitted = 0, current_record(), None
    async for event in events:
        if not isinstance(event, TextDelta):
            note(record, event)
        if isinstance(event, Admitted):
            await context.send_initial_metadata(answering.beginning(seed))
            admitted = event
        elif (message := answering.message(event)) is not None:
            number += 1
            message.sequence_number = number
            if admitted is not None:
                message.prompt.CopyFrom(answering.prompt(admitted))
                admitted = None
            await context.write(message)


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


async def _all_of(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all requests at once; raise the first error, the others then aborted.

    If inputs are invalid, the error names everything that is wrong with any of them.
    """
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        ended = (task.exception() for task in tasks if task in done)
        errors = [error for error in ended if error is not None]
        violations = [v for e in errors if isinstance(e, InvalidRequest) for v in e.violations]
        raise_if_any(list(dict.fromkeys(violations)))
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
