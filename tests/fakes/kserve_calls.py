"""Calls of a KServe server that runs in the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from tokenweir import AsyncClient
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from server.adapters.config import KserveConfig
from server.adapters.kserve.serving import serve

Stub = open_inference_pb2_grpc.GRPCInferenceServiceStub


@asynccontextmanager
async def kserve_server(
    address: str, config: KserveConfig | None = None, token: str | None = None
) -> AsyncIterator[str]:
    """Serve before the server at an address; yield where."""
    where: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = config or KserveConfig(port=0, grace=1)
    async with AsyncClient(address, max_attempts=1, timeout=60, token=token) as client:
        serving = asyncio.create_task(serve(client, config, where.set_result))
        try:
            await asyncio.wait({serving, where}, return_when=asyncio.FIRST_COMPLETED)
            yield where.result()
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@asynccontextmanager
async def stub_of(
    address: str, config: KserveConfig | None = None, token: str | None = None
) -> AsyncIterator[Stub]:
    """Serve before the server at an address; yield what calls it."""
    async with kserve_server(address, config, token) as where:
        async with grpc.aio.insecure_channel(where) as channel:
            yield Stub(channel)


def request(
    model: str, *tensors: protocol.ModelInferRequest.InferInputTensor, **options: Any
) -> protocol.ModelInferRequest:
    """Return a request; `options` are its parameters, by their types."""
    found = protocol.ModelInferRequest(model_name=model, inputs=tensors)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in options.items():
        setattr(found.parameters[name], kinds[type(value)], value)
    return found


def tensor(
    name: str, datatype: str, shape: tuple[int, ...], **contents: Any
) -> protocol.ModelInferRequest.InferInputTensor:
    """Return an input with its typed contents."""
    return protocol.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=contents
    )


def texts(*values: str) -> protocol.ModelInferRequest.InferInputTensor:
    """Return the input of texts."""
    encoded = [value.encode() for value in values]
    return tensor("text", "BYTES", (len(values),), bytes_contents=encoded)


def values(response: protocol.ModelInferResponse, name: str) -> list[Any]:
    """Return the typed contents of an output."""
    (found,) = (output for output in response.outputs if output.name == name)
    field = {"BYTES": "bytes_contents", "FP32": "fp32_contents", "INT32": "int_contents"}
    return list(getattr(found.contents, field[found.datatype]))
