"""Services that a CallServer answers itself: handlers of grpcio's kind, behind interceptors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from grpc import aio

from server.grpc_core import Pairs

Handler = Any  # a grpc.RpcMethodHandler, which has no types of use here


@dataclass(frozen=True)
class _Details:
    """The details by which a handler is found."""

    method: str
    invocation_metadata: Pairs


class AnswerableCall(Protocol):
    """A call, as far as it is answered here: a ServerCall, or a BearerCall."""

    method: str
    response_serializer: Callable[[Any], bytes] | None

    def invocation_metadata(self) -> Pairs:
        """Return what the client sent besides its message."""

    async def read(self) -> Any:
        """Return the next message; aio.EOF at the end of them."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error."""

    async def finish(self, response: Any = None) -> None:
        """End the call with success; `response` is the one message of a unary call."""


class LocalServices:
    """Takes handlers as a grpc.aio server does, and answers calls with them.

    An interceptor sees every method once: what it makes of a handler serves all calls.
    """

    def __init__(
        self,
        interceptors: Sequence[aio.ServerInterceptor],
        read_timeout: float | None = None,
    ) -> None:
        """`read_timeout` is how long a call may bring no message, in seconds."""
        self._interceptors = interceptors
        self._read_timeout = read_timeout
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Handler] = {}  # by method, as the interceptors have made them

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add methods."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code adds the same methods as generic ones too."""

    async def answer(self, call: AnswerableCall) -> None:
        """Answer a call; UNIMPLEMENTED if its method is not known."""
        handler = self._found.get(call.method)
        if handler is None:
            handler = await self._find(_Details(call.method, call.invocation_metadata()), 0)
            if handler is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            self._found[call.method] = handler
        call.response_serializer = handler.response_serializer
        if handler.request_streaming:
            await handler.stream_stream(_messages(call), call)
            await call.finish()
            return
        request = await self._first(call)
        if request is aio.EOF:
            return  # cancelled before it has begun
        if handler.response_streaming:
            await handler.unary_stream(request, call)
            await call.finish()
        else:
            await call.finish(await handler.unary_unary(request, call))

    async def _first(self, call: AnswerableCall) -> Any:
        if self._read_timeout is None:
            return await call.read()
        try:
            async with asyncio.timeout(self._read_timeout):
                return await call.read()
        except TimeoutError:
            what = f"the request did not come within {self._read_timeout:g} s"
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, what)

    async def _find(self, details: Any, index: int) -> Handler:
        """Return the handler of a method, as the interceptors from `index` on make it."""
        if index < len(self._interceptors):

            async def inner(details: Any) -> Handler:
                return await self._find(details, index + 1)

            return await self._interceptors[index].intercept_service(inner, details)
        found = (handler.service(details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


async def _messages(call: AnswerableCall) -> AsyncIterator[bytes]:
    while (message := await call.read()) is not aio.EOF:
        yield message
