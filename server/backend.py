"""A worker as the gateway sees it: its channel, what it serves, how much is under way there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenweir.v1 import admin_service_pb2, admin_service_pb2_grpc

logger = logging.getLogger(__name__)

RECONNECT_PAUSE = 0.2  # seconds between two attempts to watch a worker that does not answer
_LIST_TIMEOUT = 5.0  # seconds

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # the gateway retries, at another worker
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new worker at an old address starts afresh
    ("grpc.max_receive_message_length", -1),  # of answers: their size is the worker's business
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A host that has vanished without a word is noticed by pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Backend:
    """One worker."""

    def __init__(self, address: str, changed: Callable[[], Awaitable[None]]) -> None:
        self.address = address
        self.outstanding = 0  # calls of this gateway under way there
        self.serving = False  # as the worker itself reports
        self.models: frozenset[str] = frozenset()  # that are ready there
        self.channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._changed = changed
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching = asyncio.create_task(self._watch())

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a call that goes there, until it has come back."""
        self.outstanding += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.outstanding -= 1
            if not self.outstanding:
                self._idle.set()

    async def retire(self) -> None:
        """Stop watching; close the connection once the running calls have ended."""
        try:
            await self._stop_watching()
            await self._idle.wait()
        finally:
            await self.channel.close()

    async def load(self, timeout: float) -> admin_service_pb2.GetLoadResponse:
        """Ask the worker how busy it is."""
        admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        response: admin_service_pb2.GetLoadResponse = await admin.GetLoad(
            admin_service_pb2.GetLoadRequest(), timeout=timeout
        )
        return response

    async def _stop_watching(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Follow the worker's own health, which turns before it refuses and when it dies."""
        health = health_pb2_grpc.HealthStub(self.channel)
        while True:
            started = time.monotonic()
            try:
                async for response in health.Watch(health_pb2.HealthCheckRequest(service="")):
                    serving = response.status == health_pb2.HealthCheckResponse.SERVING
                    await self._set(await self._list_models() if serving else None)
            except aio.AioRpcError:
                pass
            await self._set(None)
            await asyncio.sleep(max(0.0, started + RECONNECT_PAUSE - time.monotonic()))

    async def _list_models(self) -> frozenset[str]:
        admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        response: admin_service_pb2.ListModelsResponse = await admin.ListModels(
            admin_service_pb2.ListModelsRequest(), timeout=_LIST_TIMEOUT
        )
        return frozenset(model.model for model in response.models)

    async def _set(self, models: frozenset[str] | None) -> None:
        if (models is not None, models or frozenset()) != (self.serving, self.models):
            self.serving, self.models = models is not None, models or frozenset()
            what = f"serves {', '.join(sorted(self.models))}" if self.serving else "does not serve"
            logger.info("worker %s %s", self.address, what)
            await self._changed()
