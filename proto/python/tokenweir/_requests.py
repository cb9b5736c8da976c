"""Turns the client's arguments into requests of the protocol."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from google.protobuf.message import Message

from tokenweir._chat import chat_message
from tokenweir._mapping import set_all, set_field, set_fields, token_ids
from tokenweir._options import (
    CallOptions,
    Chat,
    GenerateOptions,
    Item,
    LoadOptions,
    OperationOptions,
    PredictOptions,
    Prompt,
    ScoreOptions,
    StreamOptions,
)
from tokenweir.v1 import (
    admin_service_pb2,
    generation_service_pb2,
    prediction_service_pb2,
)

_OPERATION_TIMEOUT = 600.0  # seconds
_SAMPLING = tuple(generation_service_pb2.Sampling.DESCRIPTOR.fields_by_name)
_OF_BEAM = {"width": "beam", "end": "beam_end"}  # fields whose options have other names
_BEAM = [
    _OF_BEAM.get(one, one) for one in generation_service_pb2.BeamSearch.DESCRIPTOR.fields_by_name
]
_BELONG_TO = {name: "sampling" for name in _SAMPLING} | {name: "beam" for name in _BEAM}
_STRATEGIES = ("greedy", "sampling", "beam")
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
_LISTS = ("banned_tokens", "banned_sequences", "begin_banned_tokens", "forced_begin")
_OF_CHATS = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")

PredictionT = TypeVar(
    "PredictionT",
    prediction_service_pb2.ClassifyRequest,
    prediction_service_pb2.LabelRequest,
    prediction_service_pb2.EmbedRequest,
)


def check_names(options: Mapping[str, object], known: type, *more: str) -> None:
    """Raise TypeError, with the known names, if `options` has a name that `known` has not."""
    names = [*known.__annotations__, *more]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise TypeError(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
            f"known are {', '.join(sorted(names))}"
        )


def check_list(given: object, argument: str) -> None:
    """Raise TypeError for a text where several items are asked for."""
    if isinstance(given, str | bytes):
        raise TypeError(f"{argument}={given[:100]!r} is one text; give a list of them")


def generate_request(
    model: str, prompt: Prompt | Chat, options: GenerateOptions
) -> generation_service_pb2.GenerateRequest:
    """Return the request for one prompt, given as text or as token ids."""
    check_names(options, GenerateOptions)
    return _generate_request(model, [_input(prompt, "prompt", options)], options)


def generate_many_request(
    model: str, prompts: Sequence[Prompt | Chat], options: GenerateOptions
) -> generation_service_pb2.GenerateRequest:
    """Return the request for several prompts, which have all options in common."""
    check_names(options, GenerateOptions)
    check_list(prompts, "prompts")
    inputs = [_input(one, f"prompts[{place}]", options) for place, one in enumerate(prompts)]
    return _generate_request(model, inputs, options)


def stream_request(
    model: str, prompt: Prompt | Chat, options: StreamOptions
) -> generation_service_pb2.GenerateStreamRequest:
    """Return the request for one streamed prompt."""
    check_names(options, StreamOptions)
    request = generation_service_pb2.GenerateStreamRequest(
        request=_generate_request(model, [_input(prompt, "prompt", options)], options)
    )
    set_fields(request, options, "tokens_per_message")
    return request


def load_model_request(package: str, options: LoadOptions) -> admin_service_pb2.LoadModelRequest:
    """Return the request to load a package."""
    check_names(options, LoadOptions)
    request = admin_service_pb2.LoadModelRequest(package=package)
    set_all(request, {**options, "request_id": options.get("request_id") or str(uuid.uuid4())})
    return request


def unload_model_request(
    model: str, model_version: str, options: OperationOptions
) -> admin_service_pb2.UnloadModelRequest:
    """Return the request to unload a version."""
    check_names(options, OperationOptions)
    return admin_service_pb2.UnloadModelRequest(
        model=model,
        model_version=model_version,
        request_id=options.get("request_id") or str(uuid.uuid4()),
    )


def patient(options: OperationOptions) -> CallOptions:
    """Return how long an operator waits: to load a model takes longer than to ask one."""
    return {"timeout": options.get("timeout", _OPERATION_TIMEOUT)}


def check_single_output(options: StreamOptions) -> None:
    """Raise ValueError if more than one output is asked of a stream of text pieces."""
    num_outputs = options.get("num_outputs") or 1
    if num_outputs > 1:
        raise ValueError(
            f"num_outputs={num_outputs}: a stream gives the pieces of one output; "
            "for several use generate(), or stream_events() of AsyncClient"
        )


def score_request(
    model: str, source: Prompt, target: Prompt, options: ScoreOptions
) -> generation_service_pb2.ScoreRequest:
    """Return the request to score one target behind its source."""
    return _score_request(model, [_scored(source, target)], options)


def score_many_request(
    model: str, pairs: Sequence[tuple[Prompt, Prompt]], options: ScoreOptions
) -> generation_service_pb2.ScoreRequest:
    """Return the request to score several targets, each behind its source."""
    check_list(pairs, "pairs")
    for place, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"pairs[{place}] is not a source and its target; give both")
    inputs = [_scored(*pair, f"pairs[{place}] ") for place, pair in enumerate(pairs)]
    return _score_request(model, inputs, options)


def _scored(source: Prompt, target: Prompt, where: str = "") -> generation_service_pb2.Input:
    message = _input(source, f"{where}source", {})
    _set_prefix(message, target, f"{where}target")
    return message


def _score_request(
    model: str, inputs: Sequence[generation_service_pb2.Input], options: ScoreOptions
) -> generation_service_pb2.ScoreRequest:
    check_names(options, ScoreOptions)
    request = generation_service_pb2.ScoreRequest(inputs=inputs)
    set_fields(request, options, "top_logprobs")
    if (asked := _scheduling(options)).ListFields():
        request.scheduling.CopyFrom(asked)
    _fill_identity(request, model, options)
    return request


def prediction_request(
    kind: type[PredictionT],
    model: str,
    items: Sequence[Item],
    options: PredictOptions,
    **own: object,
) -> PredictionT:
    """Return the request to classify, label or embed items; `own` are options of that call alone.

    Raises ValueError for a pair beside `text_pair`.
    """
    check_names(options, PredictOptions, *own)
    request = kind()
    _fill_identity(request, model, options)
    request.items.extend(_item(item, f"items[{place}]") for place, item in enumerate(items))
    if (second := options.get("text_pair")) is not None:
        for place, message in enumerate(request.items):
            if message.HasField("text_pair"):
                raise ValueError(f"items[{place}] is a pair already; leave text_pair out")
            set_field(message, "text_pair", second)
    set_all(request, own | {"truncate": options.get("truncate")}, {"truncation": "truncate"})
    return request


def _generate_request(
    model: str, inputs: Sequence[generation_service_pb2.Input], options: Mapping[str, object]
) -> generation_service_pb2.GenerateRequest:
    request = generation_service_pb2.GenerateRequest(
        inputs=inputs,
        decoding=_decoding(options),
        stopping=_stopping(options),
        output=_output(options),
        scheduling=_scheduling(options),
    )
    _set_without_defaults(request, options)
    for one in request.inputs:
        _set_prefix(one, options.get("target_prefix"), "target_prefix")
        set_fields(one, options, "add_special_tokens", "truncate_prompt_tokens")
    _fill_identity(request, model, options)
    return request


def _fill_identity(request: Message, model: str, options: Mapping[str, object]) -> None:
    set_field(request, "model", model)
    set_field(request, "model_version", options.get("model_version"))
    # Names the call in logs, and makes a retry of a unary call harmless.
    set_field(request, "request_id", options.get("request_id") or str(uuid.uuid4()))


def _input(
    prompt: Prompt | Chat, argument: str, options: Mapping[str, object]
) -> generation_service_pb2.Input:
    variables = cast("Mapping[str, object] | None", options.get("chat_template_kwargs"))
    tools = cast("Sequence[Mapping[str, object]] | None", options.get("tools"))
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        chat = chat_message(cast(Chat, prompt), variables, tools, argument)
        set_fields(chat, options, "add_generation_prompt", "continue_final_message")
        return generation_service_pb2.Input(chat=chat)
    if given := [name for name in _OF_CHATS if options.get(name)]:
        raise ValueError(f"{given[0]} is for a conversation, and {argument} is none")
    if isinstance(prompt, str):
        message = generation_service_pb2.Input()
        set_field(message, "text", prompt, argument)
        return message
    return generation_service_pb2.Input(tokens=token_ids(cast(Sequence[int], prompt), argument))


def _set_prefix(message: generation_service_pb2.Input, prefix: object, argument: str) -> None:
    if prefix is None or isinstance(prefix, str):
        set_field(message, "prefix_text", prefix, argument)
    else:
        message.prefix_tokens.CopyFrom(token_ids(prefix, argument))  # type: ignore[arg-type]  # checked there


def _item(item: Item, argument: str) -> prediction_service_pb2.Item:
    match item:
        case str():
            message = prediction_service_pb2.Item()
            set_field(message, "text", item, argument)
            return message
        case (str(text), str(second)):
            message = prediction_service_pb2.Item()
            set_field(message, "text", text, f"{argument}[0]")
            set_field(message, "text_pair", second, f"{argument}[1]")
            return message
        case bytes():
            return prediction_service_pb2.Item(image=item)
        case Path():
            return prediction_service_pb2.Item(image=item.read_bytes())
        case _:
            return prediction_service_pb2.Item(tokens=token_ids(item, argument))


def _decoding(options: Mapping[str, object]) -> generation_service_pb2.Decoding:
    """Return how the next token is chosen; raises ValueError for options that exclude another."""
    message = generation_service_pb2.Decoding()
    match _strategy(options):
        case "sampling":
            message.sampling.SetInParent()
            set_all(message.sampling, options)
        case "beam":
            message.beam.SetInParent()
            set_all(message.beam, options, _OF_BEAM)
        case "greedy":
            message.greedy.SetInParent()
    set_fields(message, options, "num_outputs", "forced_begin", "forced_end")
    runs = cast("Sequence[Sequence[int]]", options.get("banned_sequences") or ())
    banned = [token_ids(run, "banned_sequences") for run in runs]
    set_all(message.controls, {**options, "banned_sequences": banned or None})
    _fill_constraint(message, options)
    return message


def _stopping(options: Mapping[str, object]) -> generation_service_pb2.Stopping:
    """Return when to stop."""
    message = generation_service_pb2.Stopping()
    stop = options.get("stop")
    strings = [stop] if isinstance(stop, str) else stop
    set_all(
        message, {**options, "stop": strings}, {"strings": "stop", "token_ids": "stop_token_ids"}
    )
    return message


def _output(options: Mapping[str, object]) -> generation_service_pb2.Output:
    """Return what to return; token ids always."""
    message = generation_service_pb2.Output()
    set_all(message, {**options, "token_ids": True}, {"prompt_tokens": "prompt_token_ids"})
    return message


def _scheduling(options: Mapping[str, object]) -> generation_service_pb2.Scheduling:
    """Return when and how exactly to run."""
    message = generation_service_pb2.Scheduling()
    if (is_exact := options.get("batch_invariant")) is not None:
        options = {**options, "determinism": "batch_invariant" if is_exact else "best_effort"}
    set_all(message, options)
    return message


def _set_without_defaults(
    request: generation_service_pb2.GenerateRequest, options: Mapping[str, object]
) -> None:
    """Name the defaults that do not hold: those given, and those of empty lists."""
    given = options.get("without_defaults")
    if isinstance(given, str):
        raise ValueError(f"without_defaults={given!r:.300} is one name; give a list of them")
    set_field(request, "without_defaults", given)
    lists = ((name, options.get(name)) for name in _LISTS)
    request.without_defaults.extend(
        name for name, value in lists if isinstance(value, Sequence) and not value
    )


def _strategy(options: Mapping[str, object]) -> str | None:
    """Return the strategy that is named, or else the one that the other options imply, if any."""
    given = [name for name in _BELONG_TO if options.get(name) is not None]
    implied = {_BELONG_TO[name] for name in given}
    if len(implied) > 1:
        raise ValueError(f"{', '.join(given)}: give options of sampling or of beam search only")
    strategy = options.get("strategy") or (implied.pop() if implied else None)
    if strategy is None:
        return None
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r:.300} must be one of {', '.join(_STRATEGIES)}")
    wrong = [name for name in given if _BELONG_TO[name] != strategy]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} mean nothing with strategy={strategy!r:.300}")
    return str(strategy)


def _fill_constraint(
    message: generation_service_pb2.Decoding, options: Mapping[str, object]
) -> None:
    given = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: give one of them only")
    for name in given:
        value = options[name]
        if name == "choice":
            if isinstance(value, str):
                raise ValueError(f"choice={value!r:.300} is one text; give a list of them")
            message.constraint.choice.SetInParent()
            set_field(message.constraint.choice, "values", value, name)
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else value
            set_field(message.constraint, name, text)
