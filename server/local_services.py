"""Services that a CallServer answers itself, by handlers of grpcio's kind.

Every call passes through the same: its status and deadline, what lets it in, parsing of its bytes,
what knows it by its id, then the service.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from engine.errors import (
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    MalformedMessage,
    TokenweirError,
)
from server.calls.call_server import ServerCall
from server.calls.deadlines import Deadlines, InTime, abort
from server.calls.grpc_core import Pairs
from server.calls.request_ids import client_request_id, made_request_id
from server.calls.status import call_status
from server.telemetry.logs import with_fields
from server.wire.bearer import BearerCall, current_record

logger = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
Handler = Any  # a grpc.RpcMethodHandler, which has no types of use here
Behavior = Callable[[Any, Context], Awaitable[Any]]  # a stream writes to the context instead
Interceptor = Callable[[str, Behavior], Behavior]  # does something around what a method does

AnswerableCall = ServerCall | BearerCall

# Set when a call is parsed, for everything further in and for the log lines further out; until
# somebody asks for it, "" of a call that has none.
_request_id: ContextVar[str] = ContextVar("request_id")

_MAX_CHARS = 200  # characters of an error in a record
_DEADLINE_MARGIN = 0.02  # seconds; less than that of the engines, whose words say more


def current_request_id() -> str:
    """Return the id of the call that is being answered: the client's, or one made here."""
    if not (request_id := _request_id.get()):
        _request_id.set(request_id := made_request_id())
    return request_id


@dataclass(frozen=True)
class _Details:
    """The details by which a handler is found."""

    method: str
    invocation_metadata: Pairs


class LocalServices:
    """Takes handlers as a grpc.aio server does, and answers calls with them.

    An interceptor sees every method once: what it makes of it serves all calls.
    """

    def __init__(
        self,
        max_request_bytes: int,
        read_timeout: float | None = None,
        *,
        admit: Interceptor = lambda method, inner: inner,
        identify: Interceptor = lambda method, inner: inner,
    ) -> None:
        """`read_timeout` is how long a call may bring no message, in seconds.

        `admit` comes before the bytes of a request are parsed, `identify` when its id is known.
        """
        self._max_bytes, self._read_timeout = max_request_bytes, read_timeout
        self._admit, self._identify = admit, identify
        self._deadlines = Deadlines()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, tuple[Handler, Behavior]] = {}  # by method

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add methods."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code adds the same methods as generic ones too."""

    async def answer(self, call: AnswerableCall) -> None:
        """Answer a call; UNIMPLEMENTED if its method is not known."""
        if (found := self._found.get(call.method)) is None:
            found = self._found[call.method] = await self._find(call)
        handler, behavior = found
        context: Any = call
        call.response_serializer = handler.response_serializer
        request = _messages(call) if handler.request_streaming else await self._first(call)
        if request is not aio.EOF:  # else cancelled before it has begun
            await call.finish(await behavior(request, context))

    async def _first(self, call: AnswerableCall) -> Any:
        if self._read_timeout is None:
            return await call.read()
        try:
            async with asyncio.timeout(self._read_timeout):
                return await call.read()
        except TimeoutError:
            what = f"the request did not come within {self._read_timeout:g} s"
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, what)

    async def _find(self, call: AnswerableCall) -> tuple[Handler, Behavior]:
        method = call.method
        details: Any = _Details(method, call.invocation_metadata())
        found = (handler.service(details) for handler in self._handlers)
        handler: Handler = next((one for one in found if one is not None), None)
        if handler is None:
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        inner = self._identify(method, _behavior(handler))
        parsing = self._parsing(method, handler, inner)
        return handler, self._with_status(method, self._admit(method, parsing))

    def _with_status(self, method: str, inner: Behavior) -> Behavior:
        """Answer every error with its status and details; never with a stack trace."""

        async def around(request: Any, context: Context) -> Any:
            _request_id.set(getattr(context, "request_id", ""))  # a gateway gives one
            record = current_record()
            try:
                async with InTime(context, _DEADLINE_MARGIN, self._deadlines):
                    response = await inner(request, context)
            except TokenweirError as error:
                record.error = str(error)[:_MAX_CHARS]
                await _abort(context, error)
            except aio.BaseError:  # aborted further in
                raise
            except Exception as error:
                request_id = current_request_id()
                fields = with_fields(request_id=request_id)
                logger.exception("%s, request %s failed", method, request_id, extra=fields)
                record.error = type(error).__name__
                what = f"request {request_id} failed inside the server; its log says why"
                await _abort(context, EngineFailure(what))
            record.request_id = current_request_id()
            return response

        return around

    def _parsing(self, method: str, handler: Handler, inner: Behavior) -> Behavior:
        """Parse requests: gRPC would answer malformed bytes with UNKNOWN, no details."""

        def parsed(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                what = f"{len(data)} bytes are not a request of {method}"
                raise MalformedMessage([FieldViolation("request", what)]) from error

        async def all_parsed(messages: AsyncIterator[bytes], context: Context) -> Any:
            return await inner((parsed(data) async for data in messages), context)

        async def around(data: bytes, context: Context) -> Any:
            if len(data) > self._max_bytes:
                limit = f"more than {self._max_bytes:,}, the most that a request may have"
                way_out = "start the server with a larger max_request_bytes ([limits] of --config)"
                what = f"{len(data):,} bytes are {limit}; send less in a call, or {way_out}"
                raise InvalidRequest([FieldViolation("request", what)])
            request = parsed(data)
            if (request_id := client_request_id(request)) is not None:
                _request_id.set(request_id)
            return await inner(request, context)

        return all_parsed if handler.request_streaming else around


async def _messages(call: AnswerableCall) -> AsyncIterator[bytes]:
    while (message := await call.read()) is not aio.EOF:
        yield message


async def _abort(context: Context, error: TokenweirError) -> None:
    record, request_id = current_record(), current_request_id()
    record.request_id, record.reason = request_id, error.reason
    await abort(context, call_status(error, request_id))


def _behavior(handler: Handler) -> Behavior:
    """Return what answers a call; a generator is turned into a writer of its messages."""
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream
    if not inspect.isasyncgenfunction(behavior):
        return behavior  # type: ignore[no-any-return]

    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(behavior(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return write_all
