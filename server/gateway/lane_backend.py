"""A worker on the old wire: lanes, calls of their own, and its health as it is watched."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import cast

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenweir.keepalive import keepalive_options
from tokenweir.v1 import admin_service_pb2, admin_service_pb2_grpc

from engine.background import in_background
from server.gateway.backend import CONNECTION_OPTIONS, RECONNECT_PAUSE, Answer, Backend
from server.gateway.worker_calls import WorkerCalls
from server.gateway.worker_channel import WorkerChannel
from server.identity.peers import CHANNEL_OPTIONS, Peers
from server.wire.protocol import Metadata
from server.wire.worker_call import Client, WorkerCall, WorkerFailed

_LIST_TIMEOUT = 5.0  # seconds
_SILENT = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})


class LaneBackend(Backend):
    """One worker."""

    def start(
        self,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
        client: Client | None,
    ) -> WorkerCall:
        return self.calls.start(method, request, metadata, timeout, client)

    async def ask(
        self,
        method: str,
        request: Message,
        answer: type[Answer],
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Answer:
        ask = self._channel.unary_unary(method, Message.SerializeToString, answer.FromString)
        response: Answer = await ask(request, timeout)
        return response

    async def retire(self) -> bool:
        await self._stop_watching()
        return await super().retire()

    async def close(self) -> None:
        await self._stop_watching()
        self.calls.close()

    def _connect(self, peers: Peers | None) -> None:
        options = (*CONNECTION_OPTIONS, *keepalive_options(self._silence, self._silence))
        if peers is None:
            self.calls = WorkerCalls(self.address, options)
        else:
            credentials = peers.of_channel()
            self.calls = WorkerCalls(self.address, (*options, *CHANNEL_OPTIONS), credentials)
        self._channel = WorkerChannel(self.calls)
        channel = cast(aio.Channel, self._channel)  # as far as stubs go
        self._admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._watching = in_background(f"watching worker {self.address}", self._watch)

    async def _answers(self) -> bool:
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._silence)
        except WorkerFailed as error:
            return error.code not in _SILENT
        return True

    async def _stop_watching(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            started = time.monotonic()
            with suppress(WorkerFailed):
                async for response in self._health.Watch(health_pb2.HealthCheckRequest()):
                    serving = response.status == health_pb2.HealthCheckResponse.SERVING
                    await self._set(await self._list_models() if serving else None)
            await self._set(None)
            await asyncio.sleep(max(0.0, started + RECONNECT_PAUSE - time.monotonic()))

    async def _list_models(self) -> list[admin_service_pb2.ModelInfo]:
        response: admin_service_pb2.ListModelsResponse = await self._admin.ListModels(
            admin_service_pb2.ListModelsRequest(), timeout=_LIST_TIMEOUT
        )
        return list(response.models)
