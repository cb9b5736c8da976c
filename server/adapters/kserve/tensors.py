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
    }
)
_LENGTH = struct.Struct("<I")  # stands before each element of BYTES
_MAX_DIMENSIONS = 8  # no tensor here has more; a product of thousands of them takes minutes


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
        where = f"inputs[{index}] ({short(sent.name)})"
        if sent.name in found:
            raise Refused(f"{where}: there is an input of this name already")
        if len(sent.shape) > _MAX_DIMENSIONS:
            raise Refused(
                f"{where}: {len(sent.shape):,} dimensions; give {_MAX_DIMENSIONS} at most"
            )
        values = _raw_values(where, sent, raw[index]) if raw else _typed_values(where, sent)
        shape = tuple(sent.shape)
        if min(shape, default=0) < 0 or math.prod(shape) != len(values):
            raise Refused(f"{where}: {len(values)} values are not of shape {list(shape)}")
        found[sent.name] = Tensor(sent.name, sent.datatype, shape, values)
    return found


def write_outputs(
    response: protocol.ModelInferResponse, outputs: Sequence[Tensor], *, is_raw: bool
) -> None:
    """Put tensors into an answer, raw or in the field for their type."""
    for tensor in outputs:
        field, letter = _TYPES[tensor.datatype]
        sent = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if not is_raw:
            getattr(sent.contents, field).extend(tensor.values)
        elif letter:
            values = struct.pack(f"<{len(tensor.values)}{letter}", *tensor.values)
            response.raw_output_contents.append(values)
        else:
            elements = (_LENGTH.pack(len(one)) + one for one in tensor.values)
            response.raw_output_contents.append(b"".join(elements))


def _typed_values(where: str, sent: protocol.ModelInferRequest.InferInputTensor) -> Sequence[Any]:
    field, _ = _type(where, sent.datatype)
    values = getattr(sent.contents, field)
    if sent.datatype != "UINT8":
        return list(values)
    try:
        return bytes(values)
    except ValueError as error:
        raise Refused(f"{where}: a value is not within 0 to 255") from error


def _raw_values(
    where: str, sent: protocol.ModelInferRequest.InferInputTensor, data: bytes
) -> Sequence[Any]:
    _, letter = _type(where, sent.datatype)
    if sent.HasField("contents"):
        raise Refused(f"{where}: it has contents beside raw_input_contents; give one of them")
    if letter == "B":
        return data
    if not letter:
        return _elements(where, data)
    size = struct.calcsize(letter)
    if len(data) % size:
        raise Refused(f"{where}: {len(data)} bytes are no whole number of {sent.datatype}")
    return struct.unpack(f"<{len(data) // size}{letter}", data)


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


def _type(where: str, datatype: str) -> tuple[str, str]:
    if datatype not in _TYPES:
        raise Refused(
            f"{where}: datatype {short(datatype)!r} is not taken; known are {', '.join(_TYPES)}"
        )
    return _TYPES[datatype]
