"""Lets an operator end the requests that run at a worker."""

from __future__ import annotations

from typing import Any

from server.interceptors import (
    Behavior,
    Context,
    Handler,
    WrappingInterceptor,
    current_request_id,
    with_behavior,
)
from server.running_requests import RunningRequests


class AbortInterceptor(WrappingInterceptor):
    """Knows the calls of services by their ids; it stands where the ids are known."""

    def __init__(self, services: frozenset[str], requests: RunningRequests) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._requests = requests

    def wrap(self, method: str, handler: Handler) -> Handler:
        if not method.startswith(self._prefixes):
            return handler

        async def around(behavior: Behavior, request: Any, context: Context) -> Any:
            with self._requests.abortable(current_request_id()):
                return await behavior(request, context)

        return with_behavior(handler, around)
