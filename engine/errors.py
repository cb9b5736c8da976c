"""Every error that Tokenweir raises on purpose, in one tree.

    TokenweirError
    ├── InvalidRequest            the request itself is wrong: one FieldViolation per field
    │   └── MalformedMessage      the bytes are not a message
    ├── NotFound
    │   ├── ModelNotFound
    │   └── ModelVersionNotFound
    ├── Unauthenticated           nobody knows who calls
    ├── PermissionDenied          who calls may not have that
    ├── Overloaded                refused now, worth a retry: carries retry_after
    │   ├── QueueFull
    │   ├── TokenBudgetFull
    │   └── TenantQuota           ... of its tenant: names the tenant and the quota
    ├── DeadlineExpired
    │   ├── ExpiredInQueue
    │   ├── ExpiredInDecode
    │   └── CannotMeet            refused at once: carries retry_after, or None
    ├── Unavailable               carries retry_after
    │   ├── Starting
    │   ├── Draining
    │   └── ReplicaLost
    ├── CapabilityNotSupported
    ├── RequestAborted
    ├── OperationRefused          an operator asks for what would harm what is served
    │   └── LoadFailed            ... the workers of a model do not start: says why
    ├── OperationInProgress       another operator is at it
    ├── EngineFailure             a step failed: names the request, never a stack trace
    │   └── ReplicasLost          one after the other with the request: not worth a retry
    ├── DeviceError               a GPU, or the library that runs it, is not there or failed
    │   └── OutOfDeviceMemory     ... has not the memory that is wanted
    ├── ConfigError               a setting has an impossible value
    ├── PackageError              an exported package is wrong, damaged or too new
    │   └── PackageUnreachable    ... nobody answers where it is: may be asked again
    ├── CheckpointError           a checkpoint is wrong or incomplete
    └── CertificateError          the exported model is not equal to the eager model

A class that reaches a gRPC client has a `reason`: that of the `google.rpc.ErrorInfo` sent with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class TokenweirError(Exception):
    """Base of all errors raised on purpose."""

    reason: ClassVar[str] = "INTERNAL"

    def __reduce__(self) -> tuple[object, ...]:
        """Let it cross to another process as it is, whatever it was made of."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(kind: type[TokenweirError], args: tuple[object, ...]) -> TokenweirError:
    return kind.__new__(kind, *args)


@dataclass(frozen=True)
class FieldViolation:
    """A problem of one field of a request; `field` is its path in the protocol's request."""

    field: str
    description: str


class InvalidRequest(TokenweirError):
    """A request has wrong values; every wrong field is named at once."""

    reason = "INVALID_FIELD"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in self.violations))


class MalformedMessage(InvalidRequest):
    """The bytes received are not a message of the expected type."""

    reason = "MALFORMED_MESSAGE"


class NotFound(TokenweirError):
    """Something that the request names does not exist."""


class ModelNotFound(NotFound):
    """No model of that name is served."""

    reason = "MODEL_NOT_FOUND"


class ModelVersionNotFound(NotFound):
    """The model is served, but not in that version."""

    reason = "MODEL_VERSION_NOT_FOUND"


class Unauthenticated(TokenweirError):
    """The call shows no token, or an unknown one."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(TokenweirError):
    """The token of the call does not allow that."""

    reason = "PERMISSION_DENIED"


class _Retryable(TokenweirError):
    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after  # seconds
        super().__init__(message)


class Overloaded(_Retryable):
    """There is no room now."""


class QueueFull(Overloaded):
    """Too many requests are open or waiting."""

    reason = "QUEUE_FULL"


class TokenBudgetFull(Overloaded):
    """Too many tokens are waiting."""

    reason = "TOKEN_BUDGET_FULL"


class TenantQuota(Overloaded):
    """The tenant has used up its quota for now."""

    reason = "TENANT_QUOTA"

    def __init__(self, message: str, retry_after: float, *, tenant: str, quota: str) -> None:
        super().__init__(message, retry_after)
        self.tenant = tenant
        self.quota = quota  # "name: limit"


class DeadlineExpired(TokenweirError):
    """The request's deadline passed before it was finished."""


class ExpiredInQueue(DeadlineExpired):
    """The deadline passed before the request was admitted to a batch."""

    reason = "EXPIRED_IN_QUEUE"


class ExpiredInDecode(DeadlineExpired):
    """The deadline passed while the request was running."""

    reason = "EXPIRED_IN_DECODE"


class CannotMeet(DeadlineExpired):
    """The deadline would pass before the end of the answer, so the request is refused at once."""

    reason = "CANNOT_MEET"

    def __init__(self, message: str, retry_after: float | None) -> None:
        self.retry_after = retry_after  # seconds; None: too little time even with nothing waiting
        super().__init__(message)


class Unavailable(_Retryable):
    """The server cannot take the request at the moment."""


class Starting(Unavailable):
    """No worker takes the call yet: models are still being loaded, or a worker is replaced."""

    reason = "STARTING"


class Draining(Unavailable):
    """The server finishes running requests and takes no new ones."""

    reason = "DRAINING"


class ReplicaLost(Unavailable):
    """The worker that ran the request is gone; ask again, with the same request id."""

    reason = "REPLICA_LOST"


class CapabilityNotSupported(TokenweirError):
    """This model or this version of the server does not have the feature."""

    reason = "CAPABILITY_NOT_SUPPORTED"

    def __init__(self, message: str, features: Sequence[str] = ()) -> None:
        self.features = tuple(features)  # the missing ones: paths of fields, names of methods
        super().__init__(message)


class RequestAborted(TokenweirError):
    """An operator ended the request."""

    reason = "ABORTED_BY_OPERATOR"


class OperationRefused(TokenweirError):
    """The request of an operator would harm the served models."""

    reason = "OPERATION_REFUSED"


class LoadFailed(OperationRefused):
    """The workers of a model do not start; the models served before stay."""

    reason = "LOAD_FAILED"


class OperationInProgress(TokenweirError):
    """Another load or unload is running; only one runs at a time."""

    reason = "OPERATION_IN_PROGRESS"


class EngineFailure(TokenweirError):
    """The server failed; its log has the traceback, with the request id."""

    reason = "INTERNAL"


class ReplicasLost(EngineFailure):
    """The request crashed three workers one after the other and goes to no other."""

    reason = "REPLICAS_LOST"


class DeviceError(TokenweirError):
    """A GPU, or the library that runs it, is not there or failed."""


class OutOfDeviceMemory(DeviceError):
    """The device has not the memory that is wanted."""

    def __init__(self, message: str, *, lacking: int = 1) -> None:
        """`lacking` are the bytes that are missing, at least."""
        super().__init__(message)
        self.lacking = max(1, lacking)


class ConfigError(TokenweirError):
    """A setting has an impossible value."""


class PackageError(TokenweirError):
    """An exported package is wrong, damaged or too new."""


class PackageUnreachable(PackageError):
    """Nobody answers where a package is; asked again, somebody may."""


class CheckpointError(TokenweirError):
    """A checkpoint is wrong or incomplete."""


class CertificateError(TokenweirError):
    """The exported model does not agree with the eager model."""
