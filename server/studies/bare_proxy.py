"""A proxy of grpc.aio and nothing else: the least that a call costs who hands it on that way."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
        """Return how a streamed answer is relayed; nothing else is."""
        method = METHODS.get(details.method)
        if method is None or not method.server_streaming:
            return None
        ask: aio.UnaryStreamMultiCallable[bytes, bytes] = self._worker.unary_stream(details.method)

        async def relay(
            request: bytes, context: aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            async for message in ask(request, timeout=context.time_remaining()):
                yield message

        return grpc.unary_stream_rpc_method_handler(relay)
