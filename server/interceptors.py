"""Interceptors that every call of a service passes through: status of errors, parsing of its bytes.

Outermost first: StatusInterceptor, ParsingInterceptor, then the service. Methods with a stream of
requests pass through StreamParsingInterceptor only.
"""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

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
from server.deadlines import Deadlines, InTime, abort
from server.request_ids import client_request_id, made_request_id
from server.status import call_status
from server.telemetry.logs import with_fields
from server.wire.record import current_record

logger = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # no generic class at run time
Behavior = Callable[[Any, Context], Awaitable[Any]]  # a stream writes to the context instead
Around = Callable[[Behavior, Any, Context], Awaitable[Any]]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

# Set by ParsingInterceptor for everything further in, and for the log lines further out; until
# somebody asks for it, "" of a call that has none.
_request_id: ContextVar[str] = ContextVar("request_id")

_MAX_CHARS = 200  # characters of an error in a record
_DEADLINE_MARGIN = 0.02  # seconds; less than that of the engines, whose words say more


def current_request_id() -> str:
    """Return the id of the call that is being answered: the client's, or one made here."""
    if not (request_id := _request_id.get()):
        _request_id.set(request_id := made_request_id())
    return request_id


class WrappingInterceptor(aio.ServerInterceptor):
    """Wraps the behavior of every call that has one request message; `around` says how."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails],
            Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None],
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return self.wrap(handler_call_details.method, handler)

    @abstractmethod
    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return a handler that does something around the one given."""


class StatusInterceptor(WrappingInterceptor):
    """Answers every error with its status and details; never with a stack trace."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()

    def wrap(self, method: str, handler: Handler) -> Handler:
        deadlines = self._deadlines

        async def around(behavior: Behavior, request: Any, context: Context) -> Any:
            _request_id.set(getattr(context, "request_id", ""))  # a gateway gives one
            record = current_record()
            try:
                async with InTime(context, _DEADLINE_MARGIN, deadlines):
                    response = await behavior(request, context)
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

        return with_behavior(handler, around)


class ParsingInterceptor(WrappingInterceptor):
    """Parses requests itself: gRPC would answer malformed bytes with UNKNOWN, no details."""

    def __init__(self, max_request_bytes: int) -> None:
        self._max_bytes = max_request_bytes

    def wrap(self, method: str, handler: Handler) -> Handler:
        parse = handler.request_deserializer
        if parse is None:
            return handler

        async def around(behavior: Behavior, data: bytes, context: Context) -> Any:
            if len(data) > self._max_bytes:
                limit = f"more than {self._max_bytes:,}, the most that a request may have"
                way_out = "start the server with a larger max_request_bytes ([limits] of --config)"
                what = f"{len(data):,} bytes are {limit}; send less in a call, or {way_out}"
                raise InvalidRequest([FieldViolation("request", what)])
            request = _parsed(parse, data, method)
            if (request_id := client_request_id(request)) is not None:
                _request_id.set(request_id)
            return await behavior(request, context)

        return with_behavior(handler, around, takes_bytes=True)


class StreamParsingInterceptor(aio.ServerInterceptor):
    """Does the same for calls with a stream of requests, and answers their errors."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails],
            Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None],
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None or not handler.request_deserializer:
            return handler
        method, parse = handler_call_details.method, handler.request_deserializer
        deadlines = self._deadlines
        answer = cast(Callable[[Any, Context], AsyncIterator[Any]], handler.stream_stream)

        async def behavior(messages: AsyncIterator[bytes], context: Context) -> None:
            _request_id.set(getattr(context, "request_id", ""))  # a gateway gives one
            requests = (_parsed(parse, message, method) async for message in messages)
            try:
                async with InTime(context, _DEADLINE_MARGIN, deadlines):
                    async for response in answer(requests, context):
                        await context.write(response)
            except TokenweirError as error:
                await _abort(context, error)

        return grpc.stream_stream_rpc_method_handler(behavior, None, handler.response_serializer)


def with_behavior(handler: Handler, around: Around, *, takes_bytes: bool = False) -> Handler:
    """Return a handler that does `around` what the one given does."""
    behavior = partial(around, _behavior(handler))
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        behavior,
        None if takes_bytes else handler.request_deserializer,
        handler.response_serializer,
    )


def _parsed(parse: Callable[[bytes], Any], data: bytes, method: str) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise MalformedMessage(
            [FieldViolation("request", f"{len(data)} bytes are not a request of {method}")]
        ) from error


async def _abort(context: Context, error: TokenweirError) -> None:
    record, request_id = current_record(), current_request_id()
    record.request_id, record.reason = request_id, error.reason
    await abort(context, call_status(error, request_id))


def _behavior(handler: Handler) -> Behavior:
    """Return what answers a call; a generator is turned into a writer of its messages."""
    behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if not inspect.isasyncgenfunction(behavior):
        return cast(Behavior, behavior)
    generate = cast(Callable[[Any, Context], AsyncIterator[Any]], behavior)

    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as messages:  # type: ignore[type-var]
            async for message in messages:
                await context.write(message)

    return write_all
