"""What a call says of its share of the server, read from its bytes without the rest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tokenweir.v1 import generation_service_pb2

_SERVICE = "/tokenweir.v1.GenerationService"


@dataclass(frozen=True, slots=True)
class Share:
    """Whose a call is, when it wants to run, and what its client calls it."""

    tenant: str = ""
    priority: int = 0  # lower runs earlier
    request_id: str = ""  # whatever the client wrote there


def share_of(method: str, data: bytes) -> Share:
    """Return what a call asks for; the defaults where it has no such fields or is malformed."""
    if method not in _VIEWS:
        return Share()
    try:
        request = _VIEWS[method].FromString(data)
    except DecodeError:  # the worker says so
        return Share()
    request = getattr(request, "request", request)  # of a stream it is one level down
    scheduling = request.scheduling
    return Share(scheduling.tenant, scheduling.priority, request.request_id)


def _views() -> dict[str, Any]:
    """Return message classes that know of requests only the fields wanted here.

    All others are skipped, as unknown ones are: a mebibyte of them costs 3 ms, not 60.
    """
    wanted = {
        "GenerateStreamRequest": ("request",),
        "GenerateRequest": ("scheduling", "request_id"),
        "ScoreRequest": ("scheduling", "request_id"),
    }
    file = FileDescriptorProto(name="share.proto", package="tokenweir.v1", syntax="proto3")
    messages = generation_service_pb2.DESCRIPTOR.message_types_by_name
    for name, fields in wanted.items():
        file.message_type.append(_only(messages[name], *fields))
    file.message_type.append(_only(messages["Scheduling"], "tenant", "priority"))
    pool = DescriptorPool()  # of its own: in the default one the whole messages have these names
    pool.Add(file)
    return {
        f"{_SERVICE}/{name.removesuffix('Request')}": GetMessageClass(
            pool.FindMessageTypeByName(f"tokenweir.v1.{name}")
        )
        for name in wanted
    }


def _only(message: Descriptor, *names: str) -> DescriptorProto:
    whole = DescriptorProto()
    message.CopyToProto(whole)
    fields = [field for field in whole.field if field.name in names]
    return DescriptorProto(name=whole.name, field=fields)


_VIEWS = _views()
