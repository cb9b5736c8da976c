"""Turns errors into gRPC statuses: the one table, and the details sent with each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from engine import errors

DOMAIN = "tokenweir"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# A class that is not here is answered as the nearest of its bases that is.
STATUS_CODES: Mapping[type[errors.TokenweirError], grpc.StatusCode] = {
    errors.TokenweirError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelVersionNotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TokenBudgetFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TenantQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExpired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ExpiredInQueue: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ExpiredInDecode: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CannotMeet: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Starting: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.ReplicaLost: grpc.StatusCode.UNAVAILABLE,
    errors.CapabilityNotSupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.RequestAborted: grpc.StatusCode.ABORTED,
    errors.OperationRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LoadFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OperationInProgress: grpc.StatusCode.ABORTED,
    errors.EngineFailure: grpc.StatusCode.INTERNAL,
    errors.ReplicasLost: grpc.StatusCode.INTERNAL,
    errors.DeviceError: grpc.StatusCode.INTERNAL,
    errors.OutOfDeviceMemory: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.PackageError: grpc.StatusCode.INTERNAL,
    errors.PackageUnreachable: grpc.StatusCode.INTERNAL,
    errors.CheckpointError: grpc.StatusCode.INTERNAL,
    errors.CertificateError: grpc.StatusCode.INTERNAL,
}

# These classes have attributes of their own besides.
_WITH_MORE = (errors.InvalidRequest, errors.TenantQuota, errors.CapabilityNotSupported)

# Clients accept 8 KiB of trailing metadata, in which the message stands twice and details grow
# by a third in base64; what a request made long must not cost it the whole answer.
_MAX_MESSAGE_BYTES = 600
_MAX_DESCRIPTION_BYTES = 160
_MAX_FIELD_BYTES = 100
_MAX_VIOLATIONS = 12


@dataclass(frozen=True)
class CallStatus:
    """How a call ends when it fails: the three arguments of `ServicerContext.abort`."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]

    @property
    def reason(self) -> str:
        """The reason in its google.rpc.ErrorInfo; "" without one."""
        data = dict(self.trailing_metadata).get(DETAILS_KEY, b"")
        info = error_details_pb2.ErrorInfo()
        with suppress(DecodeError):
            for detail in status_pb2.Status.FromString(data).details:
                if detail.Unpack(info):
                    break
        return str(info.reason)


def call_status(error: errors.TokenweirError, request_id: str) -> CallStatus:
    """Return the status of an error, with exactly one ErrorInfo and what else its class carries."""
    code = status_code(type(error))
    message = _clip(str(error), _MAX_MESSAGE_BYTES)
    request_id = _clip(request_id, _MAX_DESCRIPTION_BYTES)
    milliseconds = None
    if isinstance(error, errors.CannotMeet | errors.Overloaded | errors.Unavailable):
        milliseconds = None if error.retry_after is None else round(error.retry_after * 1000)
    if request_id and not isinstance(error, _WITH_MORE):
        before, behind = _plain_details(error.reason, milliseconds, len(request_id))
        details = before + request_id.encode() + behind
    else:
        details = _details(*_own_details(error, request_id), milliseconds=milliseconds)
    status = status_pb2.Status(code=code.value[0], message=message)
    # Messages that stand one behind the other are one message with the fields of both.
    pairs: tuple[tuple[str, str | bytes], ...] = (
        (DETAILS_KEY, status.SerializeToString() + details),
    )
    if milliseconds is not None:
        pairs += ((PUSHBACK_KEY, str(milliseconds)),)
    return CallStatus(code, message, pairs)


@lru_cache(maxsize=4096)
def _plain_details(reason: str, milliseconds: int | None, id_length: int) -> tuple[bytes, bytes]:
    """Return details of an error that has no more of them, before and behind the request's id.

    Under overload these are sent a thousand times a second, and differ in nothing but the id.
    """
    id_here = "\0" * id_length  # a byte that stands nowhere else
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={"request_id": id_here}
    )
    before, behind = _details(info, milliseconds=milliseconds).split(id_here.encode())
    return before, behind


def _details(*details: Message, milliseconds: int | None) -> bytes:
    """Return a google.rpc.Status of nothing but details; the last says when to come back."""
    status = status_pb2.Status()
    if milliseconds is not None:
        seconds, rest = divmod(milliseconds, 1000)
        delay = Duration(seconds=seconds, nanos=rest * 1_000_000)
        details = (*details, error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        status.details.add().Pack(detail)
    data: bytes = status.SerializeToString()
    return data


def status_code(error_class: type[errors.TokenweirError]) -> grpc.StatusCode:
    """Return the code of an error, or of the nearest of its bases that has one."""
    if (code := STATUS_CODES.get(error_class)) is not None:
        return code
    return next(STATUS_CODES[c] for c in error_class.__mro__ if c in STATUS_CODES)


def _own_details(error: errors.TokenweirError, request_id: str) -> list[Message]:
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata={"request_id": request_id}
    )
    match error:
        case errors.InvalidRequest():
            return [info, _bad_request(error)]
        case errors.TenantQuota():
            failure = error_details_pb2.QuotaFailure()
            tenant = _clip(error.tenant, _MAX_DESCRIPTION_BYTES)
            failure.violations.add(subject=f"tenant:{tenant}", description=error.quota)
            return [info, failure]
        case errors.CapabilityNotSupported() if error.features:
            info.metadata["features"] = _clip(",".join(error.features), _MAX_DESCRIPTION_BYTES)
    return [info]


def _bad_request(error: errors.InvalidRequest) -> error_details_pb2.BadRequest:
    bad_request = error_details_pb2.BadRequest()
    for violation in error.violations[:_MAX_VIOLATIONS]:
        bad_request.field_violations.add(
            field=_clip(violation.field, _MAX_FIELD_BYTES),
            description=_clip(violation.description, _MAX_DESCRIPTION_BYTES),
        )
    if (more := len(error.violations) - _MAX_VIOLATIONS) > 0:
        what = f"{more} more fields are wrong: {_MAX_VIOLATIONS} are named in an answer"
        bad_request.field_violations.add(field="request", description=what)
    return bad_request


def _clip(text: str, max_bytes: int) -> str:
    """Return text that is printable ASCII, no longer than that; it may echo what a client sent."""
    if not (text.isascii() and text.isprintable()):
        text = text.encode("ascii", "backslashreplace").decode("ascii").replace("\n", " ")
    return text if len(text) <= max_bytes else text[: max_bytes - 3] + "..."
