"""The health of a server, its services and its models, as grpc.health.v1."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

_UP = health_pb2.HealthCheckResponse.SERVING
_DOWN = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_aio.HealthServicer):  # type: ignore[misc]
    """Health by name; nothing is known, and "" is NOT_SERVING, until it is published."""

    def __init__(self) -> None:
        super().__init__()
        self._server_status[""] = _DOWN
        self._closed = asyncio.Event()

    async def publish(self, name: str, *, serving: bool) -> None:
        """Set the health of one name."""
        await self.set(name, _UP if serving else _DOWN)

    async def go_down(self) -> None:
        """Set everything to NOT_SERVING for good."""
        await self.enter_graceful_shutdown()

    def close(self) -> None:
        """End the calls that watch; they would last as long as the server."""
        self._closed.set()

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        """Send the health of a name whenever it changes, until `close`."""
        tasks = [
            asyncio.ensure_future(super().Watch(request, context)),
            asyncio.ensure_future(self._closed.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
