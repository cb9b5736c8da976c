"""Answers the calls of the Open Inference Protocol by calls of the server behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from tokenweir import AsyncClient, TokenweirClientError
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from engine.errors import QueueFull
from server.adapters.caller import client_as
from server.adapters.config import KserveConfig
from server.adapters.kserve.descriptions import (
    config_of,
    index_of,
    metadata_of,
    server_metadata,
)
from server.adapters.kserve.errors import Refused, as_sent
from server.adapters.kserve.inference import Inference
from server.adapters.kserve.requests import parameters_of, read_message
from server.adapters.kserve.tasks import Answered
from server.adapters.kserve.tensors import write_outputs
from server.calls.call_wall import CallWall

Context = grpc.aio.ServicerContext[Any, Any]
Write = Callable[[protocol.ModelStreamInferResponse], Awaitable[None]]
_MOST_OF_STREAM = 64  # requests of one stream that run at once; the next one waits


class KserveService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The service of the protocol; a call of it is one of our server."""

    def __init__(self, client: AsyncClient, inference: Inference, config: KserveConfig) -> None:
        self._client, self._inference = client, inference
        self._wall = CallWall(config.max_requests, config.max_open_bytes)
        self._reading: set[asyncio.Task[None]] = set()  # the requests of streams

    async def ServerLive(
        self, request: protocol.ServerLiveRequest, context: Context
    ) -> protocol.ServerLiveResponse:
        """Answer that this process is alive."""
        return protocol.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: protocol.ServerReadyRequest, context: Context
    ) -> protocol.ServerReadyResponse:
        """Return whether the server behind serves."""
        return protocol.ServerReadyResponse(ready=await self._inference.is_serving())

    async def ModelReady(
        self, request: protocol.ModelReadyRequest, context: Context
    ) -> protocol.ModelReadyResponse:
        """Return whether a model serves, or one version of it."""
        asked = self._caller(context), request.name, request.version
        return protocol.ModelReadyResponse(ready=await self._inference.is_ready(*asked))

    async def ServerMetadata(
        self, request: protocol.ServerMetadataRequest, context: Context
    ) -> protocol.ServerMetadataResponse:
        """Describe this server."""
        return protocol.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(
        self, request: protocol.ModelMetadataRequest, context: Context
    ) -> protocol.ModelMetadataResponse:
        """Describe the inputs and outputs of a model, over all of its tasks."""
        asked = self._caller(context), request.name, request.version
        return protocol.ModelMetadataResponse(**metadata_of(*await self._inference.model(*asked)))

    async def ModelConfig(
        self, request: protocol.ModelConfigRequest, context: Context
    ) -> protocol.ModelConfigResponse:
        """Describe how a model is called."""
        asked = self._caller(context), request.name, request.version
        model, _ = await self._inference.model(*asked)
        return protocol.ModelConfigResponse(config=protocol.ModelConfig(**config_of(model)))

    async def RepositoryIndex(
        self, request: protocol.RepositoryIndexRequest, context: Context
    ) -> protocol.RepositoryIndexResponse:
        """List the models."""
        found = index_of(await self._caller(context).models(), ready=request.ready)
        return protocol.RepositoryIndexResponse(
            models=[protocol.RepositoryIndexResponse.ModelIndex(**one) for one in found]
        )

    async def ModelStatistics(
        self, request: protocol.ModelStatisticsRequest, context: Context
    ) -> protocol.ModelStatisticsResponse:
        """Tell what models have done."""
        asked = self._caller(context), request.name, request.version
        return protocol.ModelStatisticsResponse(**await self._inference.statistics(*asked))

    async def ModelInfer(
        self, request: protocol.ModelInferRequest, context: Context
    ) -> protocol.ModelInferResponse:
        """Run a model."""
        with self._wall.holding(request.ByteSize()):
            asked, caller = read_message(request), self._caller(context)
            found = await self._inference.infer(caller, asked, context.time_remaining())
        return _response(request, found)

    async def ModelStreamInfer(  # type: ignore[override]  # it writes, instead of yielding
        self, requests: AsyncIterator[protocol.ModelInferRequest], context: Context
    ) -> None:
        """Run models, and answer each request in pieces; those of several come as they are ready.

        An error is the last piece of the request that it is of, and the stream goes on.
        """
        writing, places = asyncio.Lock(), asyncio.Semaphore(_MOST_OF_STREAM)

        async def write(piece: protocol.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(piece)

        async def answer(request: protocol.ModelInferRequest) -> None:
            try:
                await self._stream(request, context, write)
            finally:
                places.release()

        async def read() -> None:
            await places.acquire()
            async for request in requests:
                running.create_task(answer(request))
                await places.acquire()

        async with asyncio.TaskGroup() as running:
            reading = running.create_task(read())
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    def stop_reading(self) -> None:
        """Let streams end with the requests that have come."""
        for task in self._reading:
            task.cancel()

    async def _stream(
        self, request: protocol.ModelInferRequest, context: Context, write: Write
    ) -> None:
        """Write the pieces of the answer to one request of a stream."""
        try:
            with self._wall.holding(request.ByteSize()):
                asked, caller = read_message(request), self._caller(context)
                pieces = self._inference.stream(caller, asked, context.time_remaining())
                async with aclosing(pieces):
                    async for piece in pieces:
                        response = _response(request, piece)
                        final = response.parameters["triton_final_response"]
                        final.bool_param = piece.usage is not None
                        await write(protocol.ModelStreamInferResponse(infer_response=response))
        except TokenweirClientError as error:
            await write(_failed(request, as_sent(str(error))))
        except (Refused, QueueFull) as error:
            code = error.code if isinstance(error, Refused) else grpc.StatusCode.RESOURCE_EXHAUSTED
            await write(_failed(request, f"{code.name}: {error}"))

    def _caller(self, context: Context) -> AsyncClient:
        headers = dict(context.invocation_metadata() or ())
        texts = {name: value for name, value in headers.items() if isinstance(value, str)}
        return client_as(self._client, texts)


def _response(request: protocol.ModelInferRequest, found: Answered) -> protocol.ModelInferResponse:
    response = protocol.ModelInferResponse(
        model_name=request.model_name, model_version=found.version, id=request.id
    )
    for name, value in parameters_of(found).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(response.parameters[name], kind, value)
    write_outputs(response, found.outputs, is_raw=bool(request.raw_input_contents))
    return response


def _failed(request: protocol.ModelInferRequest, message: str) -> protocol.ModelStreamInferResponse:
    response = protocol.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.parameters["triton_final_response"].bool_param = True
    return protocol.ModelStreamInferResponse(error_message=message, infer_response=response)
