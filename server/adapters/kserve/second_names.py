"""The names that Triton's back ends for LLMs have for parts of a generation, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from server.adapters.kserve.errors import Refused
from server.adapters.kserve.tensors import Tensor

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
MAX_TOKENS, STREAM = "max_tokens", "stream"
_LIMIT = "max_new_tokens"


def in_own_names(
    inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return inputs and parameters of a generation; those back ends have the options as inputs.

    Raises Refused for what is given twice.
    """
    inputs, parameters = dict(inputs), dict(parameters)
    if TEXT_INPUT in inputs:
        _check_single(TEXT_INPUT, "text", inputs)
        inputs["text"] = replace(inputs.pop(TEXT_INPUT), name="text")
    for name in (MAX_TOKENS, STREAM):
        if (tensor := inputs.pop(name, None)) is None:
            continue
        if name in parameters:
            raise Refused(f"{name} is an input and a parameter; give one of them")
        if len(tensor.values) != 1:
            raise Refused(f"{name} has {len(tensor.values):,} values; give one")
        (parameters[name],) = tensor.values
    if MAX_TOKENS in parameters:
        _check_single(MAX_TOKENS, _LIMIT, parameters)
        parameters[_LIMIT] = parameters.pop(MAX_TOKENS)
    return inputs, parameters


def _check_single(second: str, first: str, given: Mapping[str, object]) -> None:
    if first in given:
        raise Refused(f"{first} and {second} are names of the same; give one of them")
