"""A proxy of grpc.aio and nothing else: the least cost of handing on a call that way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from server.api import METHODS


class BareProxy(grpc.GenericRpcHandler):
    """Asks a worker each call anew, and hands on the bytes of its messages as they come."""

    def __init__(self, worker: aio.Channel) -> None:
        self._worker = worker

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return how a call is relayed; None: there is no such method."""
        if (method := METHODS.get(details.method)) is None:
            return None
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(details.method))
        return grpc.unary_unary_rpc_method_handler(self._unary(details.method))

    def _stream(self, path: str) -> Any:
        ask: aio.UnaryStreamMultiCallable[bytes, bytes] = self._worker.unary_stream(path)

        async def relay(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async for message in ask(request, timeout=context.time_remaining()):
                yield message

        return relay

    def _unary(self, path: str) -> Any:
        ask: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._worker.unary_unary(path)

        async def relay(request: bytes, context: Any) -> bytes:
            return await ask(request, timeout=context.time_remaining())

        return relay
