"""Requests, and what is read from a call that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from tokenweir.v1 import (
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

UP = health_pb2.HealthCheckResponse.SERVING
DOWN = health_pb2.HealthCheckResponse.NOT_SERVING


class Stubs:
    """Everything that can be asked of one address."""

    def __init__(self, channel: aio.Channel, address: str = "") -> None:
        self.channel, self.address = channel, address
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def health_of(self, name: str) -> int:
        response = await self.health.Check(health_pb2.HealthCheckRequest(service=name))
        return response.status

    async def wait_for_health(self, name: str, status: int) -> None:
        async with asyncio.timeout(60):
            async for response in self.health.Watch(health_pb2.HealthCheckRequest(service=name)):
                if response.status == status:
                    return

    async def still_serves(self) -> bool:
        response = await self.generation.Generate(generate("still here"), timeout=60)
        return response.results[0].sequences[0].text == "still here "


@asynccontextmanager
async def stubs_for(address: str) -> AsyncIterator[Stubs]:
    options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
    async with aio.insecure_channel(address, options=options) as channel:
        yield Stubs(channel, address)


def generate(*texts: str, model: str = "dates", **fields: Any) -> Any:
    inputs = [generation_service_pb2.Input(text=text) for text in texts]
    return generation_service_pb2.GenerateRequest(model=model, inputs=inputs, **fields)


def stream(text: str, *, tokens_per_message: int | None = None, **fields: Any) -> Any:
    return generation_service_pb2.GenerateStreamRequest(
        request=generate(text, **fields), tokens_per_message=tokens_per_message
    )


@dataclass(frozen=True)
class Failure:
    """How a call failed."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    violations: dict[str, str]  # by path of the field
    retry_after: float | None  # seconds
    pushback: str | None  # milliseconds

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason}: {self.message}"


async def failure_of(call: Awaitable[Any] | aio.UnaryStreamCall[Any, Any]) -> Failure:
    """Await a call that must fail with the details of this protocol."""
    with pytest.raises(aio.AioRpcError) as caught:
        if isinstance(call, aio.UnaryStreamCall):
            _ = [message async for message in call]
        else:
            await call
    return failure(caught.value)


def failure(error: aio.AioRpcError) -> Failure:
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error.code()} {error.details()}"
    unpacked: dict[type, Any] = {}
    for detail in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            if detail.Is(kind.DESCRIPTOR):
                assert kind not in unpacked, f"two of {kind.__name__}"
                unpacked[kind] = kind.FromString(detail.value)
    info = unpacked[error_details_pb2.ErrorInfo]
    assert info.domain == "tokenweir"
    bad_request = unpacked.get(error_details_pb2.BadRequest)
    retry = unpacked.get(error_details_pb2.RetryInfo)
    return Failure(
        code=error.code(),
        message=error.details() or "",
        reason=info.reason,
        metadata=dict(info.metadata),
        violations={v.field: v.description for v in bad_request.field_violations}
        if bad_request
        else {},
        retry_after=retry.retry_delay.ToTimedelta().total_seconds() if retry else None,
        pushback=dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms"),
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait until something becomes true that tells nobody."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)
