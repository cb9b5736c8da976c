"""An option of a generation, in one table: as the client, the command line and the engine know it.

They are three lists, for each is typed, explained and checked where it is read; here it is seen
that they are the same one.
"""

from __future__ import annotations

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
from engine.requests.request import (
    BeamEnd,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    Strategy,
)
from server.cli.app import cli
from server.cli.generation_options import client_options
from server.cli.load_test_options import REQUEST_OPTIONS
from server.worker.params import sampling_params


class Option(NamedTuple):
    """An option with a value that is not its default, everywhere it is known."""

    name: str  # of the client
    value: Any
    typed: str  # on the command line; "{}" is a file that holds the value
    path: str  # of the engine's field; those outside SamplingParams are read by the service
    engine: Any = None  # its value there, where it is not the client's
    beside: str = ""  # what it is an option of


OPTIONS = (
    Option("strategy", "sampling", "--strategy sampling", "strategy"),
    Option("temperature", 0.5, "--temperature 0.5", "temperature"),
    Option("top_k", 40, "--top-k 40", "top_k"),
    Option("top_p", 0.5, "--top-p 0.5", "top_p"),
    Option("min_p", 0.25, "--min-p 0.25", "min_p"),
    Option("typical_p", 0.5, "--typical-p 0.5", "typical_p"),
    Option("seed", 7, "--seed 7", "seed"),
    Option("best_of", 4, "--best-of 4", "best_of"),
    Option("beam", 3, "--beam 3", "beam_width"),
    Option("length_penalty", 0.5, "--length-penalty 0.5", "length_penalty", beside="beam"),
    Option("length_power", -1.5, "--length-power -1.5", "length_power", beside="beam"),
    Option("beam_end", "enough", "--beam-end enough", "beam_end", beside="beam"),
    Option("renormalize", True, "--renormalize", "renormalize", beside="beam"),
    Option("num_outputs", 2, "--num-outputs 2", "num_outputs"),
    Option("repetition_penalty", 1.5, "--repetition-penalty 1.5", "controls.repetition_penalty"),
    Option("frequency_penalty", 0.5, "--frequency-penalty 0.5", "controls.frequency_penalty"),
    Option("presence_penalty", 0.5, "--presence-penalty 0.5", "controls.presence_penalty"),
    Option("no_repeat_ngram", 3, "--no-repeat-ngram 3", "controls.no_repeat_ngram"),
    Option("logit_bias", {5: -1.5}, "--logit-bias 5=-1.5", "controls.logit_bias", ((5, -1.5),)),
    Option("banned_tokens", (8, 9), "--ban 8 --ban 9", "controls.banned_tokens"),
    Option(
        "banned_sequences",
        ((5, 7), (3, 2, 1)),
        "--ban-run 5,7 --ban-run 3,2,1",
        "controls.banned_sequences",
    ),
    Option("begin_banned_tokens", (8,), "--ban-begin 8", "controls.begin_banned_tokens"),
    Option(
        "encoder_no_repeat_ngram",
        3,
        "--encoder-no-repeat-ngram 3",
        "controls.encoder_no_repeat_ngram",
    ),
    Option("forced_begin", (5, 7), "--forced-begin 5,7", "forced_begin"),
    Option("forced_end", 0, "--forced-end 0", "forced_end"),
    Option("json_schema", "{}", "--json-schema {}", "constraint.json_schema", ("{}",)),
    Option("regex", "a+", "--regex a+", "constraint.regex", ("a+",)),
    Option("grammar", "start: A", "--grammar {}", "constraint.grammar", ("start: A",)),
    Option("choice", ("a", "b"), "--choice a --choice b", "constraint.choice"),
    Option("target_prefix", "20", "--prefix 20", "request.target_prefix"),
    Option("max_new_tokens", 5, "--max-new-tokens 5", "max_new_tokens"),
    Option("min_new_tokens", 2, "--min-new-tokens 2", "min_new_tokens"),
    Option("stop", ("a", "b"), "--stop a --stop b", "stop_strings"),
    Option("stop_token_ids", (3,), "--stop-token 3", "stop_token_ids"),
    Option("include_stop", True, "--include-stop", "include_stop"),
    Option("ignore_eos", True, "--ignore-eos", "ignore_eos"),
    Option("skip_special_tokens", False, "--keep-special-tokens", "skip_special_tokens"),
    Option(
        "chat_template_kwargs",
        {"a": 1},
        '--chat-template-kwargs {"a":1}',
        "call.template_variables",
    ),
    Option(
        "without_defaults",
        ("beam", "top_k"),
        "--without-default beam --without-default top_k",
        "call.without_defaults",
    ),
    Option("logprobs", 0, "--logprobs 0", "logprobs"),
    Option("prompt_logprobs", 2, "--prompt-logprobs 2", "prompt_logprobs"),
    Option("alignment", True, "--alignment", "alignment"),
    Option("allow_partial", True, "--allow-partial", "allow_partial"),
    Option("priority", -2, "--priority -2", "request.priority"),
    Option("tenant", "team", "--tenant team", "request.tenant"),
    Option("batch_invariant", True, "--batch-invariant", "call.determinism"),
    Option("tokens_per_message", 4, "--tokens-per-message 4", "call.tokens_per_message"),
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
BEAM = ("beam", "length_penalty", "length_power", "beam_end", "renormalize")
SECOND_NAMES = {"stop_strings"}  # of `stop`, in Python
by_name = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


def test_the_table_has_every_option_of_the_client() -> None:
    names = {*StreamOptions.__annotations__} - {*CallOptions.__annotations__} - SECOND_NAMES

    assert [option.name for option in OPTIONS] == list(dict.fromkeys(o.name for o in OPTIONS))
    assert {option.name for option in OPTIONS} == names


def test_the_table_has_every_field_of_the_engine() -> None:
    request = {"target_prefix", "priority", "tenant"}
    of_the_call = {"request_id", "prompt", "params", "deadline", "deltas", "input_path"}
    expected = {
        *({field.name for field in fields(SamplingParams)} - {"controls", "constraint"}),
        *(f"controls.{field.name}" for field in fields(LogitControls)),
        *(f"constraint.{kind}" for kind in get_args(ConstraintKind)),
        *(f"request.{name}" for name in request),
    }

    assert {field.name for field in fields(GenerationRequest)} == request | of_the_call
    assert {o.path for o in OPTIONS if not o.path.startswith("call.")} == expected


def test_the_table_has_every_default_of_a_package_and_it_reaches_the_same_field() -> None:
    table = {option.name: option for option in OPTIONS}

    for name in GenerationDefaults.model_fields:
        option = table[name]
        default = GenerationDefaults.model_validate({name: option.value})
        asked = {"strategy": "sampling"} if name in SAMPLING else {}
        asked = {"strategy": "beam"} if name in BEAM else asked
        params = filled({**asked}, default)
        room, _, field = option.path.rpartition(".")
        found = getattr(params.controls if room else params, field)
        assert found == option.value, name
        assert filled({**asked}, default, {name}) == filled({**asked}, default, {"*"}), name
        assert filled({**asked}, default, {"*"}) == filled({**asked}, GenerationDefaults()), name


@pytest.mark.parametrize(
    ("name", "values", "of_protocol"),
    [
        (
            "strategy",
            get_args(Strategy),
            len(pb.Decoding.DESCRIPTOR.oneofs_by_name["strategy"].fields),
        ),
        ("beam_end", get_args(BeamEnd), len(pb.BeamEnd.values()) - 1),  # without "unspecified"
    ],
)
def test_client_command_line_worker_and_protocol_know_the_same_values(
    name: str, values: tuple[str, ...], of_protocol: int
) -> None:
    typed = next(one for one in cli.commands["generate"].params if one.name == name).type
    beside = {"beam": 2} if name == "beam_end" else {}

    def request(value: str) -> pb.GenerateRequest:
        return stream_request("m", "prompt", {name: value, **beside}).request  # type: ignore[misc]

    assert isinstance(typed, click.Choice) and tuple(typed.choices) == values
    assert [getattr(sampling_params(request(value)), name) for value in values] == [*values]
    assert of_protocol == len(values)
    with pytest.raises(ValueError, match=f"one of {', '.join(values)}$"):
        request("other")


@by_name
def test_the_command_line_types_it_as_the_client_takes_it(option: Option, tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text(str(option.value))
    words = option.typed.replace("{}", str(file)).split()
    command = cli.commands["generate"]

    typed = command.make_context("generate", ["--model", "m", "text", *words]).params
    for name in ("model", "texts", "as_json", "timeout", "server"):
        del typed[name]

    assert client_options(typed) == {option.name: option.value}


@by_name
def test_the_load_test_has_it_under_the_same_name(option: Option, tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text(str(option.value))
    words = option.typed.replace("{}", str(file)).split()

    typed = cli.commands["loadtest"].make_context("loadtest", ["--model", "m", *words]).params

    named = client_options({str(one.name): typed[str(one.name)] for one in REQUEST_OPTIONS})
    assert named == ({} if option.name == "seed" else {option.name: option.value})


@by_name
def test_what_the_client_takes_reaches_its_field(option: Option) -> None:
    beside = {"beam": 2} if option.beside == "beam" else {}

    is_of_chats = option.name == "chat_template_kwargs"
    prompt: Any = [{"role": "user", "content": "a"}] if is_of_chats else "prompt"

    message = stream_request("m", prompt, {option.name: option.value, **beside})  # type: ignore[misc]
    request = message.request
    room, _, name = option.path.rpartition(".")
    params = sampling_params(request)
    found: object
    match room:
        case "":
            found = getattr(params, name)
            assert found != getattr(SamplingParams(), name)
        case "controls":
            found = getattr(params.controls, name)
        case "constraint":
            assert params.constraint is not None
            assert params.constraint == Constraint(name, params.constraint.values)  # type: ignore[arg-type]
            found = params.constraint.values
        case "request":
            found = {
                "target_prefix": request.inputs[0].prefix_text,
                "priority": request.scheduling.priority,
                "tenant": request.scheduling.tenant,
            }[name]
        case "call":
            invariant = common_pb2.DETERMINISM_BATCH_INVARIANT
            found = {
                "without_defaults": tuple(request.without_defaults),
                "determinism": request.scheduling.determinism == invariant,
                "tokens_per_message": message.tokens_per_message,
                "template_variables": dict(request.inputs[0].chat.template_variables),
            }[name]

    assert found == (option.value if option.engine is None else option.engine)
