"""Answers the calls of the Open Inference Protocol by calls of the server behind."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable
from importlib import metadata
from typing import Any, TypeVar

import grpc
from tokenweir import AsyncClient, ModelInfo, TokenweirClientError
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from engine.errors import QueueFull
from server.adapters.caller import HEALTH_SECONDS, client_as
from server.adapters.config import KserveConfig
from server.adapters.kserve.errors import Refused, abort, refused_arguments
from server.adapters.kserve.parameters import TIMEOUT, read_parameters
from server.adapters.kserve.tasks import Answered, Asked, Named, inputs_of, task_for, tasks_of
from server.adapters.kserve.tensors import read_inputs, write_outputs
from server.call_wall import CallWall

T = TypeVar("T")
Versions = list[ModelInfo]  # one model's, at least one
Context = grpc.aio.ServicerContext[Any, Any]
_PLATFORM = "tokenweir_onnx"
_KNOWN_SECONDS = 5.0  # validity of a model's description


class KserveService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The service of the protocol; a call of it is one of our server."""

    def __init__(self, client: AsyncClient, config: KserveConfig) -> None:
        self._client, self._config = client, config
        self._wall = CallWall(config.max_requests, config.max_open_bytes)
        self._models: dict[str, tuple[float, Versions]] = {}

    async def ServerLive(
        self, request: protocol.ServerLiveRequest, context: Context
    ) -> protocol.ServerLiveResponse:
        """Answer that this process is alive."""
        return protocol.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: protocol.ServerReadyRequest, context: Context
    ) -> protocol.ServerReadyResponse:
        """Return whether the server behind serves."""
        return protocol.ServerReadyResponse(ready=await self._is_serving(""))

    async def ModelReady(
        self, request: protocol.ModelReadyRequest, context: Context
    ) -> protocol.ModelReadyResponse:
        """Return whether a model serves, or one version of it."""
        ready = await self._is_serving(request.name)
        if ready and request.version:
            found = await _answered(context, self._described(context, request.name))
            versions = {model.model_version for model in found if model.state == "ready"}
            ready = request.version in versions
        return protocol.ModelReadyResponse(ready=ready)

    async def ServerMetadata(
        self, request: protocol.ServerMetadataRequest, context: Context
    ) -> protocol.ServerMetadataResponse:
        """Describe this server."""
        return protocol.ServerMetadataResponse(
            name="tokenweir", version=metadata.version("tokenweir")
        )

    async def ModelMetadata(
        self, request: protocol.ModelMetadataRequest, context: Context
    ) -> protocol.ModelMetadataResponse:
        """Describe the inputs and outputs of a model, over all of its tasks."""
        return await _answered(context, self._metadata(request, context))

    async def ModelInfer(
        self, request: protocol.ModelInferRequest, context: Context
    ) -> protocol.ModelInferResponse:
        """Run a model."""
        return await _answered(context, self._infer(request, context))

    async def _metadata(
        self, request: protocol.ModelMetadataRequest, context: Context
    ) -> protocol.ModelMetadataResponse:
        found = await self._described(context, request.name)
        versions = [model.model_version for model in found]
        if request.version and request.version not in versions:
            raise Refused(
                f"{request.name} has version {', '.join(versions)}, not {request.version}",
                grpc.StatusCode.NOT_FOUND,
            )
        model = found[versions.index(request.version) if request.version else 0]
        outputs = {
            name: one for task in tasks_of(model) for one in task.outputs for name in one[:1]
        }
        return protocol.ModelMetadataResponse(
            name=model.model,
            versions=versions,
            platform=_PLATFORM,
            inputs=list(map(_tensor, inputs_of(model))),
            outputs=list(map(_tensor, outputs.values())),
        )

    async def _infer(
        self, request: protocol.ModelInferRequest, context: Context
    ) -> protocol.ModelInferResponse:
        client = _client_as(self._client, context)
        parameters = read_parameters(request)
        options = {
            "model_version": request.model_version or None,
            "request_id": request.id or None,
            "timeout": _seconds(parameters.pop(TIMEOUT, None), context, self._config.timeout),
            "answer_others": False,  # nobody would get their answers
        }
        with self._wall.holding(request.ByteSize()):
            # The call itself refuses callers that may not use the model.
            told, models = self._models.get(request.model_name, (0.0, []))
            if not models or time.monotonic() - told >= _KNOWN_SECONDS:
                models = await self._asked_for(client, request.model_name)
            model = models[0]
            task = task_for(model, [output.name for output in request.outputs])
            asked = Asked(model, read_inputs(request), parameters, options)
            with refused_arguments():
                found = await task.run(client, asked)
        return _response(request, found)

    async def _is_serving(self, name: str) -> bool:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._client.health(name) == "SERVING"
        except (TokenweirClientError, TimeoutError):
            return False

    async def _described(self, context: Context, name: str) -> Versions:
        """Return the server's description of a model for the caller."""
        return await self._asked_for(_client_as(self._client, context), name)

    async def _asked_for(self, client: AsyncClient, name: str) -> Versions:
        now = time.monotonic()
        found: dict[str, Versions] = defaultdict(list)
        for model in await client.models():
            found[model.model].append(model)
        self._models = {known: (now, models) for known, models in found.items()}
        if name not in found:
            raise Refused(
                f"no model {name!r} is served here; there are {', '.join(sorted(found)) or 'none'}",
                grpc.StatusCode.NOT_FOUND,
            )
        return found[name]


async def _answered(context: Context, answer: Awaitable[T]) -> T:
    """Return an answer; what it raises ends the call with its status."""
    try:
        return await answer
    except Refused as error:
        await context.abort(error.code, str(error))
    except QueueFull as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except TokenweirClientError as error:
        await abort(context, error)
    raise AssertionError("abort raises")


def _client_as(client: AsyncClient, context: Context) -> AsyncClient:
    headers = dict(context.invocation_metadata() or ())
    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    return client_as(client, texts)


def _seconds(microseconds: Any, context: Context, most: float) -> float:
    """Return the time that a call has: the least of what is said of it."""
    limits: list[float | None] = [most, context.time_remaining()]
    if microseconds is not None:
        if type(microseconds) is not int or microseconds < 0:
            raise Refused(f"timeout ({microseconds}) is to be a number of microseconds")
        limits.append(microseconds / 1e6 or None)  # 0 says nothing
    return min(limit for limit in limits if limit is not None)


def _response(request: protocol.ModelInferRequest, found: Answered) -> protocol.ModelInferResponse:
    response = protocol.ModelInferResponse(
        model_name=request.model_name, model_version=found.version, id=request.id
    )
    response.parameters["input_tokens"].int64_param = found.usage.input_tokens
    response.parameters["output_tokens"].int64_param = found.usage.output_tokens
    response.parameters["request_id"].string_param = found.request_id
    names = {output.name for output in request.outputs}
    outputs = [one for one in found.outputs if not names or one.name in names]
    write_outputs(response, outputs, is_raw=bool(request.raw_input_contents))
    return response


def _tensor(named: Named) -> protocol.ModelMetadataResponse.TensorMetadata:
    name, datatype, shape = named
    return protocol.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=shape)
