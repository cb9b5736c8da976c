"""The health of a server, its services and its models, as grpc.health.v1."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context = aio.ServicerContext[Any, Any]

_MOST_WATCHING = 4096  # calls at once: they last, and are not authenticated
_MAX_NAME = 1024  # characters of what is watched, which is kept as long
_UP = health_pb2.HealthCheckResponse.SERVING
_DOWN = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health by name; nothing is known, and "" is NOT_SERVING, until it is published.

    grpcio's own servicer writes to a watcher under the lock that it sets a status with: a client
    that does not read would hold up the server, and its shutdown, forever.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _DOWN}
        self._is_down = False
        self._is_closed = False
        self._changed = asyncio.Event()  # another one after every change
        self._num_watching = 0

    def publish(self, name: str, *, serving: bool) -> bool:
        """Set the health of a name unless all is down for good; return whether it has changed."""
        status = _UP if serving else _DOWN
        if has_changed := not self._is_down and self._statuses.get(name) != status:
            self._statuses[name] = status
            self._tell()
        return has_changed

    def go_down(self) -> None:
        """Set everything to NOT_SERVING for good."""
        self._is_down = True
        self._statuses = dict.fromkeys(self._statuses, _DOWN)
        self._tell()

    def close(self) -> None:
        """End the calls that watch; they would last as long as the server."""
        self._is_closed = True
        self._tell()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return the health of a name; NOT_FOUND if it is not known."""
        status = self._statuses.get(request.service)
        if status is None:
            what = f"nothing here is called {request.service[:64]!a}"
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        """Return the health of every name."""
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in self._statuses.items()
            }
        )

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the health of a name whenever it changes, until `close`."""
        if len(request.service) > _MAX_NAME:
            what = f"service has {len(request.service):,} characters; nothing here has {_MAX_NAME}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        if self._num_watching >= _MOST_WATCHING:
            what = f"{_MOST_WATCHING:,} calls watch here, the most that may; Check is answered"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        self._num_watching += 1
        try:
            await self._watch(request.service, context)
        finally:
            self._num_watching -= 1

    async def _watch(self, name: str, context: Context) -> None:
        sent = None
        while not self._is_closed:
            changed = self._changed
            status = self._statuses.get(name, _UNKNOWN)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            else:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
