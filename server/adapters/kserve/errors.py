"""Errors as statuses of gRPC, with the details that our own server sends."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from tokenweir import TokenweirClientError

from engine.errors import QueueFull
from engine.requests.options import OPTIONS

_DOMAIN = "tokenweir"
_PUSHBACK = "grpc-retry-pushback-ms"
_FIELD = re.compile(r"\b(?:request\.)?((?:decoding|stopping|output)(?:\.\w+)+)")
_PARAMETERS: Mapping[str, str] = MappingProxyType({one.path: one.name for one in OPTIONS})
_MAX_NAME, _MAX_MESSAGE = 100, 800  # characters that an error repeats, and has


class Refused(Exception):
    """A request that is not sent on; `code` says to whom the fault belongs.

    A long message is cut: clients take 8 KiB of it, in which a character may have nine bytes.
    """

    def __init__(
        self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> None:
        super().__init__(short(message, _MAX_MESSAGE))
        self.code = code


def short(text: str, most: int = _MAX_NAME) -> str:
    """Return a text, or the beginning of a longer one: callers may send any."""
    return text if len(text) <= most else text[:most] + "..."


def as_sent(message: str) -> str:
    """Return a message of the server with the parameters in the place of its fields."""
    return _FIELD.sub(lambda path: _PARAMETERS.get(path[1], path[0]), message)


@contextlib.contextmanager
def refused_arguments() -> Iterator[None]:
    """Refuse what our client cannot send at all: it names the argument."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error


@contextlib.asynccontextmanager
async def statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:  # type: ignore[type-arg]
    """End a call with the status of what the block raises."""
    try:
        yield
    except Refused as error:
        await context.abort(error.code, str(error))
    except QueueFull as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except TokenweirClientError as error:
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext, error: TokenweirClientError) -> None:  # type: ignore[type-arg]
    """End a call as that of the server behind has ended."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason or error.code.name, domain=_DOMAIN, metadata=error.metadata
    )
    details: list[Message] = [info]
    pushback: tuple[tuple[str, str], ...] = ()
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(1000 * error.retry_after))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        pushback = ((_PUSHBACK, str(round(1000 * error.retry_after))),)
    if error.violations:
        violation = error_details_pb2.BadRequest.FieldViolation
        fields = (
            violation(field=one.field, description=one.description) for one in error.violations
        )
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    message = as_sent(str(error).partition(": ")[2])  # without the name of the code
    packed = [any_pb2.Any() for _ in details]
    for one, detail in zip(packed, details, strict=True):
        one.Pack(detail)
    found = rpc_status.to_status(
        status_pb2.Status(code=error.code.value[0], message=message, details=packed)
    )
    await context.abort(error.code, message, (*found.trailing_metadata, *pushback))
