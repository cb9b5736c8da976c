"""The Open Inference Protocol in JSON, with tensors as bytes behind it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt

from server.adapters.kserve.errors import Refused, short
from server.adapters.kserve.requests import InferRequest, parameters_of
from server.adapters.kserve.tasks import Answered
from server.adapters.kserve.tensors import (
    MAX_DIMENSIONS,
    Tensor,
    add_input,
    letter_of,
    place_of,
    raw_bytes,
    raw_values,
)

_ALL_BINARY = "binary_data_output"  # parameter of a request: all outputs, unless one says it
# JSON's values by the letters of types; all others are whole numbers.
_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"": (str,), "?": (bool,), "f": (int, float)}
)


class _OfInput(BaseModel, extra="forbid"):
    binary_data_size: StrictInt | None = None  # bytes of the values behind the JSON


class _OfOutput(BaseModel, extra="forbid"):
    binary_data: StrictBool | None = None


class _Input(BaseModel):
    name: str
    datatype: str
    shape: list[StrictInt]
    parameters: _OfInput = _OfInput()
    data: list[Any] | None = None


class _Output(BaseModel):
    name: str
    parameters: _OfOutput = _OfOutput()


class InferBody(BaseModel):
    """The JSON of a request to run a model."""

    id: str = ""
    parameters: dict[str, Any] = {}
    inputs: list[_Input]
    outputs: list[_Output] = []


def infer_request(body: InferBody, behind: bytes, model: str, version: str) -> InferRequest:
    """Return the request of a body, and of the bytes behind its JSON; Refused for wrong tensors."""
    inputs: dict[str, Tensor] = {}
    start = 0
    for index, sent in enumerate(body.inputs):
        where, size = place_of(index, sent.name), sent.parameters.binary_data_size
        if (size is None) == (sent.data is None):
            raise Refused(f"{where}: give its values as data, or with binary_data_size")
        if size is None:
            values = _values(where, sent.datatype, sent.data or [])
        elif not 0 <= size <= len(behind) - start:
            raise Refused(
                f"{where}: binary_data_size is {size:,}, and {len(behind) - start:,} bytes follow"
            )
        else:
            values = raw_values(where, sent.datatype, behind[start : start + size])
            start += size
        add_input(inputs, where, Tensor(sent.name, sent.datatype, tuple(sent.shape), values))
    if start != len(behind):
        raise Refused(
            f"{len(behind) - start:,} bytes are of no input; give their binary_data_size there"
        )
    parameters = {name: value for name, value in body.parameters.items() if name != _ALL_BINARY}
    outputs = tuple(output.name for output in body.outputs)
    return InferRequest(model, version, body.id, parameters, inputs, outputs)


def infer_answer(body: InferBody, model: str, found: Answered) -> tuple[bytes, bytes]:
    """Return the JSON of an answer, and the bytes behind it."""
    wanted = {output.name: output.parameters.binary_data for output in body.outputs}
    all_binary = body.parameters.get(_ALL_BINARY) is True
    outputs, behind = [], b""
    for tensor in found.outputs:
        sent: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
        sent["shape"] = tensor.shape
        is_binary = wanted.get(tensor.name)
        if all_binary if is_binary is None else is_binary:
            raw = raw_bytes(tensor)
            sent["parameters"] = {"binary_data_size": len(raw)}
            behind += raw
        else:
            is_text = tensor.datatype == "BYTES"
            sent["data"] = [one.decode() if is_text else one for one in tensor.values]
        outputs.append(sent)
    answer: dict[str, Any] = {"model_name": model, "model_version": found.version}
    if body.id:
        answer["id"] = body.id
    answer |= {"parameters": parameters_of(found), "outputs": outputs}
    return json.dumps(answer, separators=(",", ":")).encode(), behind


def _values(where: str, datatype: str, data: Sequence[Any]) -> Sequence[Any]:
    """Return values of JSON, flat or nested as their shape."""
    letter = letter_of(where, datatype)
    flat = list(_flat(where, data, MAX_DIMENSIONS))
    kinds = _KINDS.get(letter, (int,))
    for one in flat:
        if type(one) not in kinds:
            raise Refused(f"{where}: {short(repr(one))} is no value of {datatype}")
    try:
        if not letter:
            return [one.encode() for one in flat]
        return raw_values(where, datatype, struct.pack(f"<{len(flat)}{letter}", *flat))
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise Refused(f"{where}: a value is out of the range of {datatype}") from error


def _flat(where: str, data: Sequence[Any], depth: int) -> Iterator[Any]:
    if not depth:
        raise Refused(f"{where}: data is nested more than {MAX_DIMENSIONS} times; give it flat")
    for one in data:
        if isinstance(one, list):
            yield from _flat(where, one, depth - 1)
        else:
            yield one
