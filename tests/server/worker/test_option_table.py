"""The client, the command line, the protocol and the engine hold to the table of options."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import pytest
from tokenweir import CallOptions, StreamOptions
from tokenweir._requests import stream_request
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.defaults import sampling_params as filled
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import BY_NAME, OPTIONS, Kind, Option
from engine.requests.request import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    LogitControls,
    SamplingParams,
)
from loadtest.cli.options import REQUEST_OPTIONS
from server.cli.app import cli
from server.cli.calls.generation_options import client_options
from server.worker.params import sampling_params


class Known(NamedTuple):
    """A kind of option: its type in the client, a value and what is typed for each part of it."""

    annotation: str
    value: Any = None
    typed: tuple[str, ...] = ()


KINDS: dict[Kind, Known] = {
    "flag": Known("bool | None"),
    "whole": Known("int | None", 3, ("3",)),
    "number": Known("float | None", 0.5, ("0.5",)),
    "word": Known("str | None"),
    "id": Known("int | None", 0, ("0",)),
    "ids": Known("Sequence[int] | None", (8, 9), ("8", "9")),
    "run": Known("Sequence[int] | None", (5, 7), ("5,7",)),
    "runs": Known("Sequence[Sequence[int]] | None", ((5, 7), (3, 2, 1)), ("5,7", "3,2,1")),
    "biases": Known("Mapping[int, float] | None", {5: -1.5}, ("5=-1.5",)),
    "text": Known("str | None", "a+", ("a+",)),
    "texts": Known("Sequence[str] | None", ("a", "b"), ("a", "b")),
    "file": Known("str | None", "{}", ("{}",)),  # a file that holds the value
}
WIDER = {  # further types that the client takes
    "json_schema": "str | Mapping[str, object] | None",
    "stop": "str | Sequence[str] | None",
}
# Options that are none of a generation's own: a value, and what is typed for it.
OF_CALLS: dict[str, tuple[Any, str]] = {
    "target_prefix": ("20", "--prefix 20"),
    "chat_template_kwargs": ({"a": 1}, '--chat-template-kwargs {"a":1}'),
    "tools": (({"type": "function"},), '--tool {"type":"function"}'),
    "add_generation_prompt": (False, "--no-generation-prompt"),
    "continue_final_message": (True, "--continue-final-message"),
    "add_special_tokens": (False, "--no-special-tokens"),
    "truncate_prompt_tokens": (20, "--truncate-prompt-tokens 20"),
    "without_defaults": (("beam", "top_k"), "--without-default beam --without-default top_k"),
    "priority": (-2, "--priority -2"),
    "tenant": ("team", "--tenant team"),
    "batch_invariant": (True, "--batch-invariant"),
    "tokens_per_message": (4, "--tokens-per-message 4"),
}


def value_of(option: Option) -> Any:
    """Return a value that is not the default."""
    if option.kind == "flag":
        return not option.default
    return option.words[-1] if option.words else KINDS[option.kind].value


def typed_for(name: str, file: Path) -> tuple[Any, list[str]]:
    """Return a value of an option, and what is typed for it."""
    if name in OF_CALLS:
        value, typed = OF_CALLS[name]
        return value, typed.split()
    option = BY_NAME[name]
    value, flags = value_of(option), option.typed.split("/")
    file.write_text(str(value))
    if option.kind == "flag":
        return value, [flags[0] if value else flags[-1]]
    parts = (value,) if option.words else KINDS[option.kind].typed
    return value, [word for part in parts for word in (flags[0], part.replace("{}", str(file)))]


def beside(option: Option) -> dict[str, Any]:
    """Return what an option cannot do without."""
    return {"beam": 2} if option.strategy == "beam" and option.name != "beam" else {}


def in_request(name: str, value: object, **others: Any) -> pb.GenerateStreamRequest:
    prompt: Any = "prompt"
    if name in ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message"):
        prompt = [{"role": "user", "content": "a"}]
    return stream_request("m", prompt, {name: value, **others})  # type: ignore[misc]


def in_engine(option: Option, params: SamplingParams) -> Any:
    if option.message == "decoding.constraint":
        return params.constraint
    of_controls = option.message == "decoding.controls"
    return getattr(params.controls if of_controls else params, option.field)


by_name = pytest.mark.parametrize("name", [*BY_NAME, *OF_CALLS])
of_table = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


def test_the_table_has_every_option_of_the_client_with_its_type() -> None:
    declared = {
        name: annotation.__forward_arg__
        for name, annotation in StreamOptions.__annotations__.items()
        if name not in {*CallOptions.__annotations__, *OF_CALLS}
    }

    assert len(BY_NAME) == len(OPTIONS)
    assert declared == {
        one.name: WIDER.get(one.name, KINDS[one.kind].annotation) for one in OPTIONS
    }


def test_the_table_has_every_field_of_the_engine_and_of_a_packages_defaults() -> None:
    of_params = {field.name for field in fields(SamplingParams)} - {"controls", "constraint"}
    of_controls = {field.name for field in fields(LogitControls)}
    of_the_call = {"target_prefix", "priority", "tenant", "request_id", "prompt", "params"}
    of_the_call |= {"truncate_prompt_tokens", "add_special_tokens"}

    assert {one.field for one in OPTIONS} == of_params | of_controls | {*get_args(ConstraintKind)}
    assert {field.name for field in fields(GenerationRequest)} == of_the_call | {
        "deadline",
        "deltas",
        "input_path",
    }
    assert GenerationDefaults.model_fields.keys() <= BY_NAME.keys()


@of_table
def test_every_row_has_its_field_in_the_protocol_and_words_their_numbers(option: Option) -> None:
    message = pb.GenerateRequest.DESCRIPTOR
    for name in option.message.split("."):
        message = message.fields_by_name[name].message_type

    if option.name == "strategy":
        assert option.words == tuple(f.name for f in message.oneofs_by_name["strategy"].fields)
        return
    field = message.fields_by_name[option.wire]
    if option.words:
        values = [value.name for value in field.enum_type.values][1:]  # without "unspecified"
        assert [value.lower().rpartition("_")[2] for value in values] == [*option.words]


@pytest.mark.parametrize("name", GenerationDefaults.model_fields)
def test_a_packages_default_reaches_the_field_that_a_request_does(name: str) -> None:
    option = BY_NAME[name]
    default = GenerationDefaults.model_validate({name: value_of(option)})
    asked = {"strategy": option.strategy} if option.strategy else {}

    assert in_engine(option, filled({**asked}, default)) == value_of(option)
    assert filled({**asked}, default, {name}) == filled({**asked}, default, {"*"})
    assert filled({**asked}, default, {"*"}) == filled({**asked}, GenerationDefaults())


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.words], ids=lambda one: one.name)
def test_client_command_line_and_worker_know_the_same_words(option: Option) -> None:
    typed = next(one for one in cli.commands["generate"].params if one.name == option.name).type

    assert isinstance(typed, click.Choice) and tuple(typed.choices) == option.words
    for word in option.words:
        message = in_request(option.name, word, **beside(option))
        assert in_engine(option, sampling_params(message.request)) == word
    with pytest.raises(ValueError, match=f"one of {', '.join(option.words)}$"):
        in_request(option.name, "other", **beside(option))


@by_name
def test_the_command_line_types_it_as_the_client_takes_it(name: str, tmp_path: Path) -> None:
    value, words = typed_for(name, tmp_path / "value")
    command = cli.commands["generate"]

    typed = command.make_context("generate", ["--model", "m", "text", *words]).params
    for other in ("model", "texts", "as_json", "timeout", "server"):
        del typed[other]

    assert client_options(typed) == {name: value}


@by_name
def test_the_load_test_has_it_under_the_same_name(name: str, tmp_path: Path) -> None:
    value, words = typed_for(name, tmp_path / "value")

    typed = cli.commands["loadtest"].make_context("loadtest", ["--model", "m", *words]).params

    named = client_options({str(one.name): typed[str(one.name)] for one in REQUEST_OPTIONS})
    assert named == ({} if name == "seed" else {name: value})


@of_table
def test_what_the_client_takes_reaches_its_field(option: Option) -> None:
    value = value_of(option)

    request = in_request(option.name, value, **beside(option)).request

    expected = tuple(value.items()) if option.kind == "biases" else value
    if option.message == "decoding.constraint":
        values = value if option.kind == "texts" else (value,)
        expected = Constraint(option.name, values)  # type: ignore[arg-type]
    found = in_engine(option, sampling_params(request))
    assert found == expected != option.default


def test_what_is_of_the_call_reaches_the_service() -> None:
    messages = {name: in_request(name, value) for name, (value, _) in OF_CALLS.items()}
    requests = {name: message.request for name, message in messages.items()}
    inputs = {name: request.inputs[0] for name, request in requests.items()}
    invariant = common_pb2.DETERMINISM_BATCH_INVARIANT

    assert {name: value for name, (value, _) in OF_CALLS.items()} == {
        "target_prefix": requests["target_prefix"].inputs[0].prefix_text,
        "chat_template_kwargs": dict(
            requests["chat_template_kwargs"].inputs[0].chat.template_variables
        ),
        "tools": tuple(map(json.loads, requests["tools"].inputs[0].chat.tools)),
        "add_generation_prompt": inputs["add_generation_prompt"].chat.add_generation_prompt,
        "continue_final_message": inputs["continue_final_message"].chat.continue_final_message,
        "add_special_tokens": inputs["add_special_tokens"].add_special_tokens,
        "truncate_prompt_tokens": inputs["truncate_prompt_tokens"].truncate_prompt_tokens,
        "without_defaults": tuple(requests["without_defaults"].without_defaults),
        "priority": requests["priority"].scheduling.priority,
        "tenant": requests["tenant"].scheduling.tenant,
        "batch_invariant": requests["batch_invariant"].scheduling.determinism == invariant,
        "tokens_per_message": messages["tokens_per_message"].tokens_per_message,
    }
