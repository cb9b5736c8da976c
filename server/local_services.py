"""Services that a CallServer answers itself, by handlers of grpcio's kind.

Every call passes through the same: its status and deadline, what lets it in, parsing of its bytes,
what knows it by its id, then the service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from contextvars import ContextVar
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
from server.calls.deadlines import abort, in_time
from server.calls.request_ids import client_request_id, made_request_id
from server.calls.status import call_status
from server.telemetry.logs import with_fields
from server.wire.bearer import BearerCall, current_record

logger = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
Handler = Any  # a grpc.RpcMethodHandler, which has no types of use here
AnswerableCall = ServerCall | BearerCall
Block = AbstractContextManager[None]  # in which something is done with a call

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


class LocalServices:
    """Takes handlers as a grpc.aio server does, and answers calls with them."""

    def __init__(
        self,
        max_request_bytes: int,
        read_timeout: float | None = None,
        *,
        admit: Callable[[AnswerableCall, int], Block] = lambda call, num_bytes: nullcontext(),
        identify: Callable[[AnswerableCall], Block] = lambda call: nullcontext(),
    ) -> None:
        """`read_timeout` is how long a call may bring no message, in seconds.

        `admit` comes before the bytes of a request are parsed, `identify` when its id is known.
        """
        self._max_bytes, self._read_timeout = max_request_bytes, read_timeout
        self._admit, self._identify = admit, identify
        self._handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add methods."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code adds the same methods as generic ones too."""

    async def answer(self, call: AnswerableCall) -> None:
        """Answer a call; UNIMPLEMENTED if its method is not known."""
        found = (one.service(call) for one in self._handlers)
        handler: Handler = next((one for one in found if one is not None), None)
        if handler is None:
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        call.response_serializer = handler.response_serializer
        request = None if handler.request_streaming else await self._first(call)
        if request is not aio.EOF:  # else cancelled before it has begun
            await call.finish(await self._with_status(call, handler, request))

    async def _first(self, call: AnswerableCall) -> Any:
        if self._read_timeout is None:
            return await call.read()
        try:
            async with asyncio.timeout(self._read_timeout):
                return await call.read()
        except TimeoutError:
            what = f"the request did not come within {self._read_timeout:g} s"
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, what)

    async def _with_status(self, call: AnswerableCall, handler: Handler, data: Any) -> Any:
        """Return the response; every error ends the call with its status, never a stack trace."""
        _request_id.set(getattr(call, "request_id", ""))  # a gateway gives one
        record = current_record()
        try:
            async with in_time(call, _DEADLINE_MARGIN):
                if data is None:
                    return await _write_all(call, handler)
                response = await self._response(call, handler, data)
        except TokenweirError as error:
            record.error = str(error)[:_MAX_CHARS]
            await _abort(call, error)
        except aio.BaseError:  # aborted further in
            raise
        except Exception as error:
            request_id = current_request_id()
            fields = with_fields(request_id=request_id)
            logger.exception("%s, request %s failed", call.method, request_id, extra=fields)
            record.error = type(error).__name__
            what = f"request {request_id} failed inside the server; its log says why"
            await _abort(call, EngineFailure(what))
        record.request_id = current_request_id()
        return response

    async def _response(self, call: AnswerableCall, handler: Handler, data: bytes) -> Any:
        """Return what the service answers; one that streams writes, and returns nothing."""
        with self._admit(call, len(data)):
            if len(data) > self._max_bytes:
                limit = f"more than {self._max_bytes:,}, the most that a request may have"
                way_out = "start the server with a larger max_request_bytes ([limits] of --config)"
                what = f"{len(data):,} bytes are {limit}; send less in a call, or {way_out}"
                raise InvalidRequest([FieldViolation("request", what)])
            request = _parsed(call, handler, data)
            if (request_id := client_request_id(request)) is not None:
                _request_id.set(request_id)
            with self._identify(call):
                return await (handler.unary_unary or handler.unary_stream)(request, call)


def _parsed(call: AnswerableCall, handler: Handler, data: bytes) -> Any:
    """Return a request: gRPC would answer malformed bytes with UNKNOWN, no details."""
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        what = f"{len(data)} bytes are not a request of {call.method}"
        raise MalformedMessage([FieldViolation("request", what)]) from error


async def _write_all(call: AnswerableCall, handler: Handler) -> None:
    """Write what a generator makes of a stream of requests."""

    async def requests() -> AsyncIterator[Any]:
        while (data := await call.read()) is not aio.EOF:
            yield _parsed(call, handler, data)

    async with aclosing(handler.stream_stream(requests(), call)) as messages:
        async for message in messages:
            await call.write(message)


async def _abort(call: AnswerableCall, error: TokenweirError) -> None:
    record, request_id = current_record(), current_request_id()
    record.request_id, record.reason = request_id, error.reason
    await abort(call, call_status(error, request_id))
