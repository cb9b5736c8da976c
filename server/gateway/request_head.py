"""A call's tenant, priority and model: read from its bytes, or appended to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tokenweir.v1 import generation_service_pb2, prediction_service_pb2

from server.request_ids import is_request_id, made_request_id

_GENERATION = "/tokenweir.v1.GenerationService"
_PREDICTION = "/tokenweir.v1.PredictionService"
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
    if method not in _VIEWS:
        return RequestHead()
    try:
        request = _VIEWS[method].FromString(data)
    except DecodeError:  # the worker says so
        return RequestHead(is_readable=False)
    is_resumed = bool(getattr(request, "origin", ""))
    request = getattr(request, "request", request)  # a stream has it one level down
    if method.startswith(_PREDICTION):
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
    if method not in _STAMPS:
        return data
    stamp = _STAMPS[method]()
    scheduling = getattr(stamp, "request", stamp).scheduling
    scheduling.tenant, scheduling.priority = head.tenant, head.priority
    return data + cast(bytes, stamp.SerializeToString())


_NAMES = ("request_id", "model", "model_version")
_SCHEDULED = {
    "GenerateStreamRequest": ("request", "origin"),
    "GenerateRequest": ("scheduling", *_NAMES),
    "ScoreRequest": ("scheduling", *_NAMES),
    "Scheduling": ("tenant", "priority"),
}
_PREDICTED = {f"{name}Request": _NAMES for name in ("Classify", "Label", "Embed")}


def message_views(
    file: Any, service: str, wanted: Mapping[str, tuple[str, ...]], syntax: str = "proto3"
) -> Any:
    """Return message classes by method that know of requests only the fields wanted.

    All others are skipped, as unknown ones are: a mebibyte of them costs 3 ms, not 60.
    """
    view = FileDescriptorProto(name="head.proto", package="tokenweir.v1", syntax=syntax)
    files = (file.DESCRIPTOR, *file.DESCRIPTOR.dependencies)
    messages = {name: kind for one in files for name, kind in one.message_types_by_name.items()}
    for name, fields in wanted.items():
        view.message_type.append(_only(messages[name], *fields))
    pool = DescriptorPool()  # its own: in the default one the whole messages have these names
    pool.Add(view)
    return {
        f"{service}/{name.removesuffix('Request')}": GetMessageClass(
            pool.FindMessageTypeByName(f"tokenweir.v1.{name}")
        )
        for name in wanted
        if name.endswith("Request")
    }


def _only(message: Descriptor, *names: str) -> DescriptorProto:
    whole = DescriptorProto()
    message.CopyToProto(whole)
    fields = [field for field in whole.field if field.name in names]
    for field in fields:  # one of several, or that may be absent, is a field like others
        field.ClearField("oneof_index")
        field.ClearField("proto3_optional")
    return DescriptorProto(name=whole.name, field=fields)


_VIEWS: Mapping[str, Any] = {
    **message_views(generation_service_pb2, _GENERATION, _SCHEDULED, "proto3"),
    **message_views(prediction_service_pb2, _PREDICTION, _PREDICTED, "proto3"),
}
# In proto2 a number that was set to 0 is written, too.
_STAMPS: Mapping[str, Any] = message_views(
    generation_service_pb2, _GENERATION, _SCHEDULED, "proto2"
)
