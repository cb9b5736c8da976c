"""Reads messages into the client's dataclasses, and writes values into fields of messages.

Impossible values are refused by the name of the argument.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Hashable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from datetime import UTC
from functools import cache, partial
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from tokenweir.received import enum_name
from tokenweir.v1 import common_pb2

T = TypeVar("T")
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "google.protobuf.Duration": lambda message: message.ToTimedelta().total_seconds(),
    "google.protobuf.Timestamp": lambda message: message.ToDatetime(tzinfo=UTC),
    "tokenweir.v1.TokenIds": lambda message: tuple(message.ids),
}
_FIELDS = {  # where the dataclasses have another name
    "token_id": "id",
    "token_ids": "tokens",
    "prompt_token_ids": "prompt_tokens",
}
_NONE: Mapping[str, str] = {}
_WANTED = {
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}
_ROOM = {  # the numbers that a field has room for
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def read(kind: Callable[..., T], message: Message, **given: Any) -> T:
    """Return a dataclass with the fields that are `given`, and else those of the message by name.

    Repeated fields are tuples, durations seconds, enums their names in small letters, and bytes
    are hexadecimal where the dataclass has a text. An absent field is None where the dataclass
    says that it may be, else its default in the protocol. A oneof has the value that is set.
    """
    plan = _plan(kind, message.DESCRIPTOR)
    return kind(**{name: get(message) for name, get in plan if name not in given}, **given)


def set_field(message: Message, name: str, value: Any, argument: str | None = None) -> None:
    """Set a field, unless the value is None; `argument` is what the caller knows it as.

    An enum takes the name of its value in small letters; a sequence or a mapping is added to.
    """
    if value is None:
        return
    argument, field = argument or name, message.DESCRIPTOR.fields_by_name[name]
    held = getattr(message, name)
    if isinstance(held, MutableMapping | MutableSequence):
        try:
            if isinstance(held, MutableMapping):
                held.update(dict(value))
            else:
                held.extend(value)
        except TypeError as error:
            if field.message_type is not None:
                raise _refusal(argument, value, error) from None
            wanted = _WANTED.get(field.cpp_type, "a whole number")
            raise TypeError(f"{argument}={value!r:.300}: give a list, each {wanted}") from None
        except ValueError as error:
            raise _refusal(argument, value, error) from None
        return
    if field.enum_type is not None:
        enum = cast(EnumDescriptor, field.enum_type)
        known = {enum_name(enum, one): one for one in enum.values_by_number if one}
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{argument}={value!r:.300} must be one of {', '.join(known)}")
        value = known[value]
    try:
        setattr(message, name, value)
    except (TypeError, OverflowError):  # the latter of a huge number for a flag
        wanted = _WANTED.get(field.cpp_type, "a whole number")
        raise TypeError(f"{argument}={value!r:.300}: give {wanted}") from None
    except ValueError as error:
        if room := _ROOM.get(field.cpp_type):
            what = f"{argument}={value!r:.300} is outside {room[0]} to {room[1]}"
            raise ValueError(what) from None
        raise _refusal(argument, value, error) from None


def set_fields(message: Message, options: Mapping[str, object], *names: str) -> None:
    """Set the fields whose names are among the options."""
    for name in names:
        set_field(message, name, options.get(name))


def set_all(
    message: Message, options: Mapping[str, object], renamed: Mapping[str, str] = _NONE
) -> None:
    """Set every field whose name, or whose other one in `renamed`, is among the options."""
    for name in _names(message.DESCRIPTOR):
        option = renamed.get(name, name)
        if (value := options.get(option)) is not None:
            set_field(message, name, value, option)


@cache
def _names(descriptor: Descriptor) -> tuple[str, ...]:
    return tuple(descriptor.fields_by_name)


def token_ids(ids: Sequence[int], name: str) -> common_pb2.TokenIds:
    """Return token ids as a message."""
    try:
        return common_pb2.TokenIds(ids=ids)
    except TypeError:
        raise TypeError(
            f"{name}={ids!r:.300} is neither a text nor a sequence of token ids"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@cache
def _plan(
    kind: Hashable, descriptor: Descriptor
) -> tuple[tuple[str, Callable[[Message], Any]], ...]:
    """Return for each field that both have its name, and what reads it of a message."""
    hints: dict[str, Any] = get_type_hints(kind)
    found: list[tuple[str, Callable[[Message], Any]]] = []
    for name, hint in hints.items():
        field = descriptor.fields_by_name.get(_FIELDS.get(name, name))
        if field is not None:
            convert, may_be_none = _conversion(field, hint), NoneType in get_args(hint)
            if convert is _as_it_is and not may_be_none:  # there are many such
                found.append((name, attrgetter(field.name)))
            else:
                found.append((name, partial(_value, field.name, convert, may_be_none)))
        elif name in descriptor.oneofs_by_name:
            found.append((name, partial(_value_of_oneof, name)))
    return tuple(found)


def _value(name: str, convert: Callable[[Any], Any], may_be_none: bool, message: Message) -> Any:
    if may_be_none and not message.HasField(name):
        return None
    return convert(getattr(message, name))


def _value_of_oneof(name: str, message: Message) -> Any:
    chosen = message.WhichOneof(name)
    return None if chosen is None else getattr(message, chosen)


def _conversion(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return dict
    if inner is not None and inner.full_name in _CONVERSIONS:
        return _CONVERSIONS[inner.full_name]
    kinds = [one for one in get_args(hint) if one not in (NoneType, Ellipsis)] or [hint]
    if inner is not None:
        convert = cast(Callable[[Any], Any], partial(read, kinds[0]))
    elif field.enum_type is not None:
        convert = partial(enum_name, field.enum_type)
    elif field.type == FieldDescriptor.TYPE_BYTES and kinds[0] is str:
        convert = bytes.hex
    else:
        return tuple if get_origin(hint) is tuple else _as_it_is
    return (lambda values: tuple(map(convert, values))) if get_origin(hint) is tuple else convert


def _as_it_is(value: Any) -> Any:
    return value


def _refusal(name: str, value: object, error: TypeError | ValueError) -> TypeError | ValueError:
    if isinstance(error, UnicodeEncodeError):  # bytes that are no UTF-8, in an argument or a file
        place = f"half a surrogate pair at character {error.start + 1}"
        return ValueError(f"{name} is not Unicode text: {place}")
    return type(error)(f"{name}={value!r:.300}: {error}")
