"""Names of the protocol's values, as the client and its answers have them."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor


def enum_name(enum: EnumDescriptor, value: int) -> str:
    """Return the name of a value in small letters; the number of one newer than this client."""
    known = enum.values_by_number.get(value)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower() if known else str(value)
