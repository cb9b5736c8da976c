"""Messages of gateway and worker in a lane: one gRPC call that carries the messages of many.

A message of gRPC costs each side some tens of microseconds, however small it is. So the messages
of all streams of a worker in the same moment go to a gateway in one. A stream is a number here.

Two limits let a worker join its messages. Only so many messages of one stream may lie at the
gateway: else a client that does not read would fill it. And only so many of all streams together
may be on the way: else a busy gateway would have ever more of them to hand on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

METHOD = "/tokenweir.server.Lane/Carry"
OPEN = (("tokenweir-lane", "1"),)  # initial metadata: the worker takes calls in it
MAX_BYTES = 1 << 16  # a gateway says at once, its last request aside
MAX_REQUEST_BYTES = 1 << 14  # a larger request would hold up others, and goes by no lane
NUM_UNTAKEN = 16  # messages of a call that a worker may say before some are taken, see `weight`
NUM_TAKEN = NUM_UNTAKEN // 2  # a gateway tells when it has taken so many
NUM_UNHEARD = 256  # messages of a lane that a worker may say before some are looked at
NUM_HEARD = NUM_UNHEARD // 4  # messages of a lane that a gateway says it has looked at, at least

Metadata = tuple[tuple[str, str | bytes], ...]

_Field = FieldDescriptorProto
_MUCH = 1 << 13  # bytes
_PACKAGE = "tokenweir.server"
_BINARY = "-bin"  # ends the names of metadata that are bytes


def weight(message: bytes) -> int:
    """Return for how many messages one counts: a long one for several, for the gateway holds it."""
    return 1 + len(message) // _MUCH


def pairs_of(metadata: Iterable[tuple[str, str | bytes]]) -> list[Any]:
    """Return metadata as it is sent."""
    return [
        _CLASSES["Pair"](key=key, value=value.encode() if isinstance(value, str) else value)
        for key, value in metadata
    ]


def metadata_of(pairs: Iterable[Any]) -> Metadata:
    """Return metadata as it was before `pairs_of`."""
    return tuple((pair.key, _value(pair.key, pair.value)) for pair in pairs)


def _value(key: str, value: bytes) -> str | bytes:
    return value if key.endswith(_BINARY) else value.decode(errors="replace")


_MESSAGES = {  # fields in the order of their numbers; * is a list
    "Pair": {"key": "string", "value": "bytes"},
    "Asked": {
        "number": "uint64",
        "method": "string",
        "request": "bytes",
        "metadata": "*Pair",
        "seconds": "double",  # until its deadline; 0: it has none
    },
    "Begun": {"number": "uint64", "metadata": "*Pair"},
    "Ended": {"number": "uint64", "code": "uint32", "details": "string", "metadata": "*Pair"},
    "ToWorker": {
        "asked": "*Asked",
        "taken": "*uint64",
        "cancelled": "*uint64",
        "num_heard": "uint32",
    },
    # The messages of streams stand in two columns: no object is made of a message.
    "FromWorker": {
        "begun": "*Begun",
        "numbers": "*uint64",
        "messages": "*bytes",
        "ended": "*Ended",
    },
}


def _make_classes() -> dict[str, Any]:
    """Return the class of every message."""
    file = FileDescriptorProto(name="lane.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            _add(message, field, number, kind)
    pool = DescriptorPool()  # its own: it is not part of the protocol
    pool.Add(file)
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _add(message: DescriptorProto, name: str, number: int, kind: str) -> None:
    label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    kind = kind.removeprefix("*")
    if kind in _MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")


_CLASSES = _make_classes()
Asked, ToWorker, FromWorker = _CLASSES["Asked"], _CLASSES["ToWorker"], _CLASSES["FromWorker"]
