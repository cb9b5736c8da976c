"""The exceptions that the client raises, made from the status of a failed call.

Every one carries `code` (of gRPC), `reason` and `metadata` (of google.rpc.ErrorInfo, empty if the
server sent none), `retry_after` (google.rpc.RetryInfo, seconds or None) and `violations`
(google.rpc.BadRequest).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


@dataclass(frozen=True)
class FieldViolation:
    """An error in one field of a request."""

    field: str  # its path in the message, as "decoding.sampling.top_p"
    description: str


class TokenweirClientError(Exception):
    """A call failed; subclasses say how."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        violations: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.retry_after = retry_after
        self.violations = tuple(violations)

    @property
    def message(self) -> str:
        """The server's message, and the violations that it does not name."""
        said: str = self.args[0]
        more = [
            f"  {violation.field}: {violation.description}"
            for violation in self.violations
            if violation.description.removesuffix("...") not in said  # servers cut long ones
        ]
        return "\n".join([said, *more])

    def __str__(self) -> str:
        reason = f"/{self.reason}" if self.reason and self.reason != self.code.name else ""
        return f"{self.code.name}{reason}: {self.message}"


class InvalidArgument(TokenweirClientError):
    """The request is wrong; `violations` names every wrong field.

    `others` has the answers to those of several inputs that were not refused, by their places.
    """

    others: Mapping[int, Any] = MappingProxyType({})


class Unauthenticated(TokenweirClientError):
    """The server asks for a token, and does not know the one that was sent."""


class PermissionDenied(TokenweirClientError):
    """The token that was sent does not permit the call."""


class NotFound(TokenweirClientError):
    """Something that the request names does not exist."""


class ResourceExhausted(TokenweirClientError):
    """There is no room now; `retry_after` says when to come back."""


class DeadlineExceeded(TokenweirClientError):
    """The deadline passed before the answer was complete."""


class Unavailable(TokenweirClientError):
    """Nobody answers at the address, or the server cannot take the call at the moment."""


class NotSupported(TokenweirClientError):
    """This server or this model does not have the feature; see ModelInfo.capabilities."""


class Aborted(TokenweirClientError):
    """An operator ended the request."""


class Cancelled(TokenweirClientError):
    """The call was ended from the server's side."""


class Internal(TokenweirClientError):
    """The server failed."""


class BrokenStream(Internal):
    """The messages of a stream break the protocol, so its text cannot be trusted."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=grpc.StatusCode.DATA_LOSS, reason="BROKEN_STREAM")


_SERVER_AHEAD = 0.05  # seconds by which a server may see a deadline pass before its client does

# gRPC's own refusal, on either side: it has no details, and asking again does not help.
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")

# gRPC's words where TLS or HTTP keeps a connection from being made; the first counts.
_HANDSHAKES = (
    (
        "WRONG_VERSION_NUMBER",
        "the TLS handshake failed: the server does not speak TLS; leave out the credentials "
        "(--tls-ca)",
    ),
    (
        "certificate (has expired|is not yet valid)",
        "the TLS handshake failed: the server's certificate has expired, or is not valid yet; "
        "renew it, or look at this machine's clock",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the TLS handshake failed: the server's certificate is not trusted here; give the "
        "authority that has signed it (--tls-ca)",
    ),
    (
        "Hostname Verification",
        "the TLS handshake failed: the server's certificate has other names; call it by one of "
        "them",
    ),
    (
        "Failed parsing HTTP/2",
        "the server speaks HTTP, not gRPC; give the port of gRPC, 50051 by default",
    ),
    ("andshake failed", "the TLS handshake failed"),
    (
        "last error: UNAVAILABLE: ipv[46]:.*: (Socket closed|.*onnection reset)",
        "the server hangs up, as one does that takes calls by TLS alone (--tls-ca), wants another "
        "certificate (--tls-cert), or has too many clients",
    ),
)

_CLASS_OF_CODE: Mapping[grpc.StatusCode, type[TokenweirClientError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.UNIMPLEMENTED: NotSupported,
        grpc.StatusCode.ABORTED: Aborted,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.INTERNAL: Internal,
        grpc.StatusCode.DATA_LOSS: Internal,
    }
)


def deadline_after(timeout: float | None) -> float | None:
    """Return when a call that begins now expires, on the monotonic clock; None: never.

    Raises ValueError for what is not a number of seconds.
    """
    if timeout is None:
        return None
    if not math.isfinite(timeout):
        raise ValueError(f"timeout ({timeout}) must be seconds, or None for no deadline")
    return time.monotonic() + timeout


def seconds_until(deadline: float | None) -> float | None:
    """Return what is left until a deadline of `deadline_after`, as it takes it."""
    return None if deadline is None else deadline - time.monotonic()


@contextlib.contextmanager
def typed_errors(deadline: float | None) -> Iterator[None]:
    """Raise what fails in a call that is made in the block as the client's exceptions.

    `deadline` is that of `deadline_after`.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_call(error, deadline) from error
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        raise closed_under_way() from error


def is_task_cancelled() -> bool:
    """Say whether the task that runs is being cancelled.

    grpc.aio ends the calls of a channel that is closed with a CancelledError too, though nobody
    has cancelled the tasks that wait for them.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def closed_under_way() -> Cancelled:
    """Return the exception of a call whose client was closed before its end."""
    return Cancelled("the client was closed before the answer", code=grpc.StatusCode.CANCELLED)


def error_from_call(error: grpc.RpcError, deadline: float | None = None) -> TokenweirClientError:
    """Return the typed exception for a failed call, with what its status details say.

    `deadline` is that of `deadline_after`.
    """
    code = error.code()
    message = error.details() or "the server gave no message"
    status = _rich_status(error)
    if code is grpc.StatusCode.CANCELLED and deadline is not None and not status.details:
        # The server's end of a deadline; gRPC says CANCELLED if it comes before one's own.
        if time.monotonic() >= deadline - _SERVER_AHEAD:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not status.details:  # gRPC's own words
        message = "the deadline passed before the answer was complete; allow more time"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not status.details:
        if (sizes := _TOO_LARGE.search(message)) is not None:
            return _too_large(*map(int, sizes.groups()))
    info = error_details_pb2.ErrorInfo()
    if code is grpc.StatusCode.UNAVAILABLE and not status.details:
        for words, meaning in _HANDSHAKES:
            if re.search(words, message):
                message, info.reason = f"{meaning} ({message})", "HANDSHAKE_FAILED"
                break
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    has_retry = _unpack(status, retry)
    _unpack(status, info)
    _unpack(status, bad_request)
    return _CLASS_OF_CODE.get(code, TokenweirClientError)(
        message,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        retry_after=retry.retry_delay.ToTimedelta().total_seconds() if has_retry else None,
        violations=[FieldViolation(v.field, v.description) for v in bad_request.field_violations],
    )


def _too_large(num_bytes: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"a message of {num_bytes:,} bytes was sent, and its reader takes {limit:,} at most; send "
        "less in a call, or ask for less",
        code=grpc.StatusCode.INVALID_ARGUMENT,
        reason="MESSAGE_TOO_LARGE",
    )


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    """Return the google.rpc.Status of the call; an empty one if it has none or a wrong one."""
    try:
        return rpc_status.from_call(error) or status_pb2.Status()
    except (ValueError, DecodeError):  # contradicts the call's own status, or is none at all
        return status_pb2.Status()


def _unpack(status: status_pb2.Status, into: Message) -> bool:
    """Fill `into` from the first detail of its type; False if there is none."""
    for detail in status.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                return bool(detail.Unpack(into))
            except DecodeError:
                return False
    return False
