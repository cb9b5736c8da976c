"""A call's tenant, priority and model: read from its bytes, or appended to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from server.api import GENERATION, PREDICTION
from server.calls.request_ids import is_request_id, made_request_id
from server.gateway.views_pb2 import GenerateHead, PredictHead, ScoreHead, StreamHead

_Scheduled = type[GenerateHead] | type[ScoreHead] | type[StreamHead]
_SCHEDULED: Mapping[str, _Scheduled] = {
    f"/{GENERATION}/Generate": GenerateHead,
    f"/{GENERATION}/GenerateStream": StreamHead,
    f"/{GENERATION}/Score": ScoreHead,
}
_VIEWS: Mapping[str, _Scheduled | type[PredictHead]] = {
    **_SCHEDULED,
    **{f"/{PREDICTION}/{name}": PredictHead for name in ("Classify", "Label", "Embed")},
}
_MAX_TENANT = 256  # characters that are kept


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Tenant, priority, id and model of a request."""

    tenant: str = ""  # the beginning of one that is too long for any worker
    priority: int = 0  # lower runs earlier
    request_id: str = ""  # whatever the client wrote there
    model: str = ""  # as the client wrote it
    model_version: str = ""  # "": any
    is_resumed: bool = False  # a stream of which the client has the beginning
    is_readable: bool = True  # False: its bytes are not a message


NO_HEAD = RequestHead()  # for calls whose tenant is not known, or does not matter


def head_of(method: str, data: bytes) -> RequestHead:
    """Return what a call asks for; the defaults where it has no such fields or is malformed."""
    if (view := _VIEWS.get(method)) is None:
        return NO_HEAD
    try:
        request = view.FromString(data)
    except DecodeError:  # the worker says so
        return RequestHead(is_readable=False)
    is_resumed = False
    if isinstance(request, StreamHead):
        is_resumed, request = bool(request.origin), request.request
    if isinstance(request, PredictHead):
        return RequestHead(
            request_id=request.request_id,
            model=request.model,
            model_version=request.model_version,
        )
    scheduling = request.scheduling
    return RequestHead(
        scheduling.tenant[:_MAX_TENANT],
        scheduling.priority,
        request.request_id,
        request.model,
        request.model_version,
        is_resumed,
    )


def request_id_of(head: RequestHead) -> str:
    """Return the client's id of a call, or one made here if it has no good one."""
    if head.request_id and is_request_id(head.request_id):
        return head.request_id
    return made_request_id()


def stamped(method: str, data: bytes, head: RequestHead) -> bytes:
    """Return the bytes of a readable request, whatever they said, with this tenant and priority.

    Later fields of a message replace earlier ones, so these are appended.
    """
    if (view := _SCHEDULED.get(method)) is None:
        return data
    stamp = view()
    scheduling = stamp.request.scheduling if isinstance(stamp, StreamHead) else stamp.scheduling
    scheduling.tenant, scheduling.priority = head.tenant, head.priority
    return data + stamp.SerializeToString()
