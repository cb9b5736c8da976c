"""The names and options of a request, as our client has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenweir import GenerateOptions

from engine.requests.options import OPTIONS
from server.adapters.kserve.errors import Refused, short
from server.adapters.kserve.tensors import Tensor

# Options of the call, the caller and conversations, and those that no output has.
_NOT_TAKEN = frozenset(
    "request_id model_version timeout answer_others tenant chat_template_kwargs tools "
    "add_generation_prompt continue_final_message logprobs prompt_logprobs prompt_token_ids "
    "alignment".split()
)
GENERATION = frozenset(GenerateOptions.__annotations__) - _NOT_TAKEN
# A text is the value itself; of all others it is the JSON.
_TEXTS = {one.name for one in OPTIONS if one.kind in ("word", "text", "file")}
_TEXTS |= {"target_prefix", "stop"}
# The names that back ends of Triton for LLMs have.
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
MAX_TOKENS, STREAM = "max_tokens", "stream"
_LIMIT = "max_new_tokens"


def check_names(parameters: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    """Raise Refused for a parameter that a task does not have."""
    unknown = sorted(short(name) for name in set(parameters) - known)
    if unknown:
        raise Refused(
            f"{', '.join(unknown)}: no parameter of {what}; known are {', '.join(sorted(known))}"
        )


def generation_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a generation; lists and objects are given as JSON."""
    check_names(parameters, GENERATION, "a generation")
    found = {name: _value(name, value) for name, value in parameters.items()}
    if (bias := found.get("logit_bias")) is not None:
        try:
            found["logit_bias"] = {int(token): value for token, value in bias.items()}
        except (AttributeError, ValueError) as error:
            raise Refused(
                'parameter logit_bias is to be JSON as {"5": -1.5}: a bias for every token id'
            ) from error
    return found


def _value(name: str, value: Any) -> Any:
    if name in _TEXTS or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Refused(f"parameter {name} is {short(value)!r}; give its value as JSON") from error


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
