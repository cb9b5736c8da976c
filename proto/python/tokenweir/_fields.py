"""Puts values into fields of messages; impossible ones are refused by the name of the argument."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tokenweir.v1 import common_pb2

K = TypeVar("K")
T = TypeVar("T")
_WANTED = {
    FieldDescriptor.CPPTYPE_STRING: "give a text",
    FieldDescriptor.CPPTYPE_BOOL: "give true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "give a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "give a number",
}
_ROOM = {  # the numbers that a field has room for
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def set_field(message: Message, name: str, value: object, argument: str | None = None) -> None:
    """Set a field, unless the value is None; `argument` is what the caller knows it as."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except TypeError:
        kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
        wanted = _WANTED.get(kind, "give a whole number")
        raise TypeError(f"{argument or name}={value!r}: {wanted}") from None
    except ValueError as error:
        if room := _ROOM.get(message.DESCRIPTOR.fields_by_name[name].cpp_type):
            what = f"{argument or name}={value!r} is outside {room[0]} to {room[1]}"
            raise ValueError(what) from None
        raise _refusal(argument or name, value, error) from None


def set_fields(message: Message, options: Mapping[str, object], *names: str) -> None:
    """Set the fields whose names are among the options."""
    for name in names:
        set_field(message, name, options.get(name))


def extend_field(field: MutableSequence[T], values: object, name: str) -> None:
    """Add the values of a sequence, unless it is None."""
    if values is None:
        return
    try:
        field.extend(values)  # type: ignore[arg-type]  # checked by protobuf, at run time
    except (TypeError, ValueError) as error:
        raise _refusal(name, values, error) from None


def update_field(field: MutableMapping[K, T], values: object, name: str) -> None:
    """Add the entries of a mapping, unless it is None."""
    if values is None:
        return
    try:
        for key, value in dict(values).items():  # type: ignore[call-overload]  # as above
            field[key] = value
    except (TypeError, ValueError) as error:
        raise _refusal(name, values, error) from None


def token_ids(ids: Sequence[int], name: str) -> common_pb2.TokenIds:
    """Return token ids as a message."""
    try:
        return common_pb2.TokenIds(ids=ids)
    except TypeError as error:
        raise TypeError(
            f"{name} is a {type(ids).__name__} that is neither text nor a sequence of "
            f"token ids: {error}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _refusal(name: str, value: object, error: TypeError | ValueError) -> TypeError | ValueError:
    if isinstance(error, UnicodeEncodeError):  # bytes that are no UTF-8, in an argument or a file
        place = f"half a surrogate pair at character {error.start + 1}"
        return ValueError(f"{name} is not Unicode text: {place}")
    return type(error)(f"{name}={value!r}: {error}")
