"""Reads requests only so many at once, and ends calls with the status of what their handler raises.

gRPC would read all requests before anybody could count.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from server.adapters.kserve.errors import statuses
from server.calls.call_wall import CallWall

_SECONDS = 10.0  # for the message of a call to come
Handler = Any  # a grpc.RpcMethodHandler, which has no types of use here


class Reading(aio.ServerInterceptor):
    """Takes calls of one message as calls of many, whose handler reads when there is room.

    A call of many messages may be silent for as long as it likes, so there are only so many.
    """

    def __init__(self, max_bytes: int, max_message_bytes: int, max_streams: int) -> None:
        self._places = asyncio.Semaphore(max(1, max_bytes // max_message_bytes))
        self._streams = CallWall(max_streams, max_bytes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return what answers a method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            request = await self._read(requests, context)
            async with statuses(context):
                return await handler.unary_unary(request, context)

        async def stream(requests: AsyncIterator[Any], context: Any) -> None:
            async with statuses(context):
                with self._streams.holding(0):
                    found = handler.stream_stream(requests, context)
                    if isinstance(found, AsyncIterator):
                        async for response in found:
                            await context.write(response)
                    else:
                        await found  # it writes by itself

        serialization = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *serialization)
        return grpc.stream_unary_rpc_method_handler(answer, *serialization)

    async def _read(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """Return the message of a call; one that brings none is ended."""
        try:
            async with self._places, asyncio.timeout(_SECONDS):
                return await anext(requests)
        except TimeoutError:
            code, what = grpc.StatusCode.DEADLINE_EXCEEDED, f"did not come within {_SECONDS:g} s"
        except StopAsyncIteration:
            code, what = grpc.StatusCode.INVALID_ARGUMENT, "has no message"
        await context.abort(code, f"the request {what}")
