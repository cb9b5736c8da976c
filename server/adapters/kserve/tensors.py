"""Tensors of the protocol: what was sent as plain values, and values as what is sent."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenweir.open_inference import open_inference_pb2 as protocol

from server.adapters.kserve.errors import Refused, short

# Each type's field in InferTensorContents, and its letter for struct.
_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "BYTES": ("bytes_contents", ""),
        "UINT8": ("uint_contents", "B"),
        "INT32": ("int_contents", "i"),
        "INT64": ("int64_contents", "q"),
        "FP32": ("fp32_contents", "f"),
        "BOOL": ("bool_contents", "?"),
    }
)
_LENGTH = struct.Struct("<I")  # stands before each element of BYTES
MAX_DIMENSIONS = 8  # no tensor here has more; a product of thousands of them takes minutes


@dataclass(frozen=True)
class Tensor:
    """A tensor with its values in row-major order: bytes, whole numbers or floats."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def read_inputs(request: protocol.ModelInferRequest) -> dict[str, Tensor]:
    """Return the inputs of a request by name; Refused for values that are not of their shape."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise Refused(
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs; give one "
            "for each, or none"
        )
    found: dict[str, Tensor] = {}
    for index, sent in enumerate(request.inputs):
        where = place_of(index, sent.name)
        if raw and sent.HasField("contents"):
            raise Refused(f"{where}: it has contents beside raw_input_contents; give one of them")
        values = raw_values(where, sent.datatype, raw[index]) if raw else _typed_values(where, sent)
        add_input(found, where, Tensor(sent.name, sent.datatype, tuple(sent.shape), values))
    return found


def place_of(index: int, name: str) -> str:
    """Return how an error calls an input."""
    return f"inputs[{index}] ({short(name)})"


def add_input(found: dict[str, Tensor], where: str, tensor: Tensor) -> None:
    """Take in a tensor by its name; Refused for a second one, or values not of its shape."""
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise Refused(f"{where}: {len(tensor.shape):,} dimensions; give {MAX_DIMENSIONS} at most")
    if tensor.name in found:
        raise Refused(f"{where}: there is an input of this name already")
    shape, size = tensor.shape, len(tensor.values)
    if min(shape, default=0) < 0 or math.prod(shape) != size:
        raise Refused(f"{where}: {size} values are not of shape {list(shape)}")
    found[tensor.name] = tensor


def raw_values(where: str, datatype: str, data: bytes) -> Sequence[Any]:
    """Return the values of little-endian bytes without gaps; Refused for a part of one."""
    letter = letter_of(where, datatype)
    if letter == "B":
        return data
    if not letter:
        return _elements(where, data)
    size = struct.calcsize(letter)
    if len(data) % size:
        raise Refused(f"{where}: {len(data)} bytes are no whole number of {datatype}")
    return struct.unpack(f"<{len(data) // size}{letter}", data)


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the values of a tensor as `raw_values` takes them."""
    _, letter = _TYPES[tensor.datatype]
    if letter:
        return struct.pack(f"<{len(tensor.values)}{letter}", *tensor.values)
    return b"".join(_LENGTH.pack(len(one)) + one for one in tensor.values)


def letter_of(where: str, datatype: str) -> str:
    """Return the letter of a type for struct, "" for BYTES; Refused for a type not taken."""
    if datatype not in _TYPES:
        raise Refused(
            f"{where}: datatype {short(datatype)!r} is not taken; known are {', '.join(_TYPES)}"
        )
    return _TYPES[datatype][1]


def write_outputs(
    response: protocol.ModelInferResponse, outputs: Sequence[Tensor], *, is_raw: bool
) -> None:
    """Put tensors into an answer, raw or in the field for their type."""
    for tensor in outputs:
        sent = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if is_raw:
            response.raw_output_contents.append(raw_bytes(tensor))
        else:
            getattr(sent.contents, _TYPES[tensor.datatype][0]).extend(tensor.values)


def _typed_values(where: str, sent: protocol.ModelInferRequest.InferInputTensor) -> Sequence[Any]:
    letter_of(where, sent.datatype)  # it is known
    values = getattr(sent.contents, _TYPES[sent.datatype][0])
    if sent.datatype != "UINT8":
        return list(values)
    try:
        return bytes(values)
    except ValueError as error:
        raise Refused(f"{where}: a value is not within 0 to 255") from error


def _elements(where: str, data: bytes) -> list[bytes]:
    """Return the elements of BYTES, each of which stands behind its length."""
    found, start = [], 0
    while start < len(data):
        begin = start + _LENGTH.size
        if begin > len(data):
            raise Refused(f"{where}: the last {len(data) - start} bytes are no length of BYTES")
        (length,) = _LENGTH.unpack_from(data, start)
        start = begin + length
        if start > len(data):
            raise Refused(f"{where}: an element of {length} bytes ends behind the data")
        found.append(data[begin:start])
    return found
