"""The messages of a stream as the gateway looks at them: one, or many parsed at once."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

_PACKAGE = "tokenweir.view"
_MESSAGE = pb.GenerateStreamResponse.DESCRIPTOR
_DELTA = pb.GenerateStreamResponse.Delta.DESCRIPTOR


def index_of_end(finished: bytes) -> int:
    """Return the index of the sequence that a serialized Finished ends."""
    return pb.GenerateStreamResponse.Finished.FromString(finished).index


def numbered(message: bytes, number: int) -> bytes:
    """Return a message with this sequence number: what comes later in its bytes counts."""
    last = pb.GenerateStreamResponse(sequence_number=number)
    return message + last.SerializeToString()


def _make_views() -> tuple[Any, Any]:
    """Return the classes of StreamView and RunView.

    Fields that a message has once are repeated in them: so bytes of several messages, one behind
    the other, are read as one. Fields that are only hashed or handed on stay bytes. A StreamView
    has a list of deltas, a RunView one delta with the lists of what all of them brought: no object
    is made of a delta.
    """
    file = FileDescriptorProto(name="stream_view.proto", package=_PACKAGE, syntax="proto3")
    common_pb2.TokenIds.DESCRIPTOR.CopyToProto(file.message_type.add())
    delta = file.message_type.add(name="Delta")
    _add(delta, _DELTA, "index")
    _add(delta, _DELTA, "text", type=_BYTES)
    _add(delta, _DELTA, "tokens", type_name=f".{_PACKAGE}.TokenIds")
    _add(delta, _DELTA, "logprobs", type=_BYTES, label=_REPEATED)
    run = file.message_type.add(name="DeltaRun")
    _add(run, _DELTA, "index", label=_REPEATED)
    for name in ("text", "tokens", "logprobs"):
        _add(run, _DELTA, name, type=_BYTES, label=_REPEATED)
    _add_stream(file.message_type.add(name="StreamView"), "Delta", label=_REPEATED)
    _add_stream(file.message_type.add(name="RunView"), "DeltaRun")
    pool = DescriptorPool()  # its own: it is not part of the protocol
    pool.Add(file)
    names = ("StreamView", "RunView")
    stream, run_of = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in names)
    return GetMessageClass(stream), GetMessageClass(run_of)


def _add_stream(view: DescriptorProto, delta: str, **changed: Any) -> None:
    _add(view, _MESSAGE, "sequence_number")
    _add(view, _MESSAGE, "delta", type_name=f".{_PACKAGE}.{delta}", **changed)
    _add(view, _MESSAGE, "finished", type=_BYTES, label=_REPEATED)
    _add(view, _MESSAGE, "summary", type=_BYTES, label=_REPEATED)


def _add(to: DescriptorProto, of: Descriptor, name: str, **changed: Any) -> None:
    """Add a field with the number that it has in the protocol."""
    field = of.fields_by_name[name]
    like = {"type": field.type, "label": FieldDescriptorProto.LABEL_OPTIONAL}
    to.field.add(name=name, number=field.number, **{**like, **changed})


_REPEATED, _BYTES = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.TYPE_BYTES
StreamView, RunView = _make_views()
