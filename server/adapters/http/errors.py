"""Errors in the forms of OpenAI, KServe and TEI, by one table from what a call raises."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import tokenweir
from starlette.responses import JSONResponse

# The statuses, and what OpenAI calls the kind; a class that is not here is as the nearest base.
_STATUSES: Mapping[type[tokenweir.TokenweirClientError], tuple[int, str]] = MappingProxyType(
    {
        tokenweir.TokenweirClientError: (500, "server_error"),
        tokenweir.InvalidArgument: (400, "invalid_request_error"),
        tokenweir.Unauthenticated: (401, "authentication_error"),
        tokenweir.PermissionDenied: (403, "permission_error"),
        tokenweir.NotFound: (404, "not_found_error"),
        tokenweir.ResourceExhausted: (429, "rate_limit_error"),
        tokenweir.DeadlineExceeded: (504, "timeout_error"),
        tokenweir.Unavailable: (503, "server_error"),
        tokenweir.NotSupported: (400, "invalid_request_error"),
        tokenweir.Aborted: (409, "aborted_error"),
        tokenweir.Cancelled: (503, "server_error"),
        tokenweir.Internal: (500, "server_error"),
    }
)
_CODES: Mapping[str, str] = MappingProxyType(
    {"MODEL_NOT_FOUND": "model_not_found", "UNAUTHENTICATED": "invalid_api_key"}
)
# The paths of text-embeddings-inference (TEI), and its kinds of errors where they are none of wrong
# requests or failures.
_TEI_PATHS = ("/", "/embed", "/predict", "/info")
_TEI_TYPES: Mapping[int, str] = MappingProxyType({429: "Overloaded", 503: "Unhealthy"})

AsSent = Callable[[str], str]  # a message with the fields as a request calls them


class HttpError(Exception):
    """Ends a request with a status, and with the JSON that its clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.body: Mapping[str, object] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
        if status == 409:  # an operator has ended it; clients would ask again by themselves
            self.headers["x-should-retry"] = "false"
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def response(self, path: str) -> JSONResponse:
        """Return the whole answer to a request of a path, in the form of its protocol."""
        body = self.body
        if f"{path}/".startswith("/v2/"):
            body = {"error": self.message}
        elif path in _TEI_PATHS:
            other = "Validation" if self.status < 500 else "Backend"
            body = {"error": self.message, "error_type": _TEI_TYPES.get(self.status, other)}
        return JSONResponse(body, self.status, self.headers)


def http_error(error: tokenweir.TokenweirClientError, as_sent: AsSent = str) -> HttpError:
    """Return what a client of ours has raised as an answer."""
    status, kind = next(_STATUSES[base] for base in type(error).__mro__ if base in _STATUSES)
    if error.reason == "MESSAGE_TOO_LARGE":
        status = 413
    param = as_sent(error.violations[0].field).partition("[")[0] if error.violations else None
    return HttpError(
        status,
        as_sent(error.message),
        kind=kind,
        param=param,
        code=_CODES.get(error.reason, error.reason.lower()) or None,
        retry_after=error.retry_after,
    )


def unknown_model(
    name: str, capability: str = "do that", models: Iterable[tokenweir.ModelInfo] = ()
) -> HttpError:
    """Return the answer where no model has a name, "" for any, or can do what is asked."""
    if any(one.model == name for one in models):
        message = f"model {name} cannot {capability}; take another, /v1/models lists them"
        return HttpError(400, message, param="model", code="capability_not_supported")
    which = f"no model {name!r:.300} is served here" if name else f"no model here can {capability}"
    message = f"{which}; /v1/models lists them"
    return HttpError(404, message, kind="not_found_error", code="model_not_found")


@contextlib.contextmanager
def refused_arguments(as_sent: AsSent = str) -> Iterator[None]:
    """Answer what cannot be sent at all with 400: the client names the argument."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = as_sent(str(error))
        # Messages begin with a field, as in `seed=-1: ...` or `stop[0] is ...`.
        field = re.match(r"(\w+)(?:\[|\.|=|, \w+|:| is )", message)
        raise HttpError(400, message, param=field[1] if field else None) from error
