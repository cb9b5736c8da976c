"""Makes the client's dataclasses of messages whose fields have the same names."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import UTC
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "google.protobuf.Duration": lambda message: message.ToTimedelta().total_seconds(),
    "google.protobuf.Timestamp": lambda message: message.ToDatetime(tzinfo=UTC),
}


def read(kind: Callable[..., T], message: Message, **given: Any) -> T:
    """Return a dataclass with the fields that are `given`, and else those of the message by name.

    Repeated fields are tuples, durations seconds, enums their names in small letters, and bytes
    are hexadecimal where the dataclass has a text. An absent field is None where the dataclass
    says that it may be, else its default in the protocol.
    """
    values = {
        name: None
        if may_be_none and not message.HasField(name)
        else convert(getattr(message, name))
        for name, convert, may_be_none in _plan(kind, message.DESCRIPTOR)
        if name not in given
    }
    return kind(**values, **given)


def enum_name(enum: EnumDescriptor, value: int) -> str:
    """Return the name of a value in small letters; the number of one newer than this client."""
    known = enum.values_by_number.get(value)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower() if known else str(value)


@cache
def _plan(
    kind: Hashable, descriptor: Descriptor
) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Return for each field that both have its name, its conversion, and whether it may be None."""
    hints: dict[str, Any] = get_type_hints(kind)
    return tuple(
        (name, _conversion(field, hints[name]), NoneType in get_args(hints[name]))
        for name, field in descriptor.fields_by_name.items()
        if name in hints
    )


def _conversion(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return dict
    kinds = [one for one in get_args(hint) if one not in (NoneType, Ellipsis)] or [hint]
    if inner is not None:
        convert = _CONVERSIONS.get(inner.full_name) or partial(read, kinds[0])
    elif field.enum_type is not None:
        convert = partial(enum_name, field.enum_type)
    elif field.type == FieldDescriptor.TYPE_BYTES and kinds[0] is str:
        convert = bytes.hex
    else:
        return tuple if get_origin(hint) is tuple else _as_it_is
    return (lambda values: tuple(map(convert, values))) if get_origin(hint) is tuple else convert


def _as_it_is(value: Any) -> Any:
    return value
