"""Turns the protocol's requests into the engine's, naming every wrong field."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from google.protobuf.json_format import MessageToJson
from tokenweir.v1 import generation_service_pb2, prediction_service_pb2

from engine.config import RequestLimits
from engine.errors import FieldViolation, InvalidRequest
from engine.one_pass.prediction import PredictionItem
from engine.package.manifest import Manifest
from engine.requests.checks import raise_if_any
from engine.requests.request import (
    Chat,
    ChatMessage,
    Deltas,
    GenerationRequest,
    SamplingParams,
    ScoreRequest,
)
from engine.requests.text import Side
from server.worker.checks import (
    check_count,
    check_num_ids,
    check_scoring,
    raise_if_unsupported,
    wrong_fields_of_score,
    wrong_request_id,
)

PredictionRequest = (
    prediction_service_pb2.ClassifyRequest
    | prediction_service_pb2.LabelRequest
    | prediction_service_pb2.EmbedRequest
)
_SIDES: Mapping[int, Side | None] = {
    prediction_service_pb2.TRUNCATION_UNSPECIFIED: None,
    prediction_service_pb2.TRUNCATION_RIGHT: "right",
    prediction_service_pb2.TRUNCATION_LEFT: "left",
}
MAX_TOKENS_PER_MESSAGE = 1024
_MAX_ECHO = 64  # characters of a wrong value that an error repeats
_ORIGIN = re.compile("([0-9a-f]{32}(-(?P<seed>[0-9a-f]{1,16}))?)?")  # see `answers.origin`


def generation_requests(
    request: generation_service_pb2.GenerateRequest,
    params: SamplingParams,
    *,
    request_ids: Iterator[str],
    deadline: float | None,
    deltas: Deltas | None,
    seed: int | None,
) -> list[GenerationRequest]:
    """Return one engine request per input, in order; `params` are those of KnownOptions.

    `request_ids` gives the engine's names of them, `seed` is that of a request which draws and
    names none; None: any. Raises InvalidRequest for a conversation that cannot be read.
    """
    if params.strategy == "sampling" and params.seed is None:
        drawn = secrets.randbits(64) if seed is None else seed
        params = replace(params, seed=drawn)  # one for all inputs, see Provenance
    return [
        GenerationRequest(
            request_id=next(request_ids),
            prompt=_chat(one.chat, f"inputs[{i}].chat") if one.HasField("chat") else _prompt(one),
            params=params,
            deadline=deadline,
            input_path=f"inputs[{i}]",
            target_prefix=_target_prefix(one),
            truncate_prompt_tokens=one.truncate_prompt_tokens
            if one.HasField("truncate_prompt_tokens")
            else None,
            add_special_tokens=one.add_special_tokens or not one.HasField("add_special_tokens"),
            priority=request.scheduling.priority,
            tenant=request.scheduling.tenant,
            deltas=deltas,
        )
        for i, one in enumerate(request.inputs)
    ]


def score_requests(
    request: generation_service_pb2.ScoreRequest,
    *,
    manifest: Manifest,
    capabilities: Collection[str] = (),
    limits: RequestLimits,
    request_ids: Iterator[str],
    deadline: float | None,
) -> list[ScoreRequest]:
    """Return one engine request per input, in order; raises as `KnownOptions.params`."""
    assert manifest.generation is not None
    check_count("inputs", len(request.inputs), limits)
    check_num_ids(request.inputs, manifest.generation)
    check_scoring(request, capabilities)
    raise_if_any(wrong_fields_of_score(request, limits))
    return [
        ScoreRequest(
            request_id=next(request_ids),
            prompt=_prompt(one),
            target=_target_prefix(one),
            top_logprobs=request.top_logprobs,  # 0 if it is absent
            priority=request.scheduling.priority,
            tenant=request.scheduling.tenant,
            deadline=deadline,
            input_path=f"inputs[{i}]",
            forced_begin=manifest.defaults.forced_begin,
        )
        for i, one in enumerate(request.inputs)
    ]


def check_stream_request(request: generation_service_pb2.GenerateStreamRequest) -> int:
    """Return the tokens per message; raise for what is wrong outside of `request.request`."""
    if request.HasField("resume_after"):
        raise_if_unsupported(["resume_after"])
    violations = []
    tokens = request.tokens_per_message if request.HasField("tokens_per_message") else 1
    if not 1 <= tokens <= MAX_TOKENS_PER_MESSAGE:
        violations.append(
            FieldViolation(
                "tokens_per_message", f"{tokens} is outside 1 to {MAX_TOKENS_PER_MESSAGE}"
            )
        )
    if _ORIGIN.fullmatch(request.origin) is None:
        what = f"{request.origin[:_MAX_ECHO]!a} is no origin; give back what the stream began with"
        violations.append(FieldViolation("origin", what))
    if len(request.request.inputs) != 1:
        violations.append(
            FieldViolation(
                "request.inputs",
                f"{len(request.request.inputs)} inputs; a stream takes exactly one, "
                "Generate takes several",
            )
        )
    raise_if_any(violations)
    return tokens


def seed_of_origin(request: generation_service_pb2.GenerateStreamRequest) -> int | None:
    """Return the seed by which the stream that is resumed drew; None if it is none, or drew not."""
    found = _ORIGIN.fullmatch(request.origin)
    return int(found["seed"], 16) if found and found["seed"] else None


def prediction_items(request: PredictionRequest, limits: RequestLimits) -> list[PredictionItem]:
    """Return the items; the engine checks their contents, this only what it could not see."""
    items = request.items
    check_count("items", len(items), limits)
    violations = wrong_request_id(request.request_id)
    if request.truncation not in _SIDES:
        what = f"{request.truncation} is none of {[*_SIDES]}"
        violations.append(FieldViolation("truncation", what))
    violations += [
        FieldViolation(f"items[{i}]", "it is empty; set text, tokens or image")
        for i, item in enumerate(items)
        if item.WhichOneof("kind") is None
    ]
    raise_if_any(violations)
    stride = None
    if isinstance(request, prediction_service_pb2.LabelRequest) and request.HasField("stride"):
        stride = request.stride
    prompt = None
    if isinstance(request, prediction_service_pb2.EmbedRequest) and request.HasField("prompt_name"):
        prompt = request.prompt_name
    side = _SIDES[request.truncation]
    return [_prediction_item(item, side, stride, prompt) for item in items]


def _prediction_item(
    item: prediction_service_pb2.Item, side: Side | None, stride: int | None, prompt: str | None
) -> PredictionItem:
    content: str | bytes | tuple[int, ...]
    match item.WhichOneof("kind"):
        case "text":
            content = item.text
        case "image":
            content = item.image
        case _:
            content = tuple(item.tokens.ids)
    pair = item.text_pair if item.HasField("text_pair") else None
    return PredictionItem(content, pair, side, stride, prompt)


def _chat(chat: generation_service_pb2.Chat, path: str) -> Chat:
    messages = tuple(map(_chat_message, chat.messages))
    tools = tuple(_tool(one, f"{path}.tools[{i}]") for i, one in enumerate(chat.tools))
    is_continued = chat.continue_final_message
    is_begun = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    if is_continued and is_begun:
        said = "it goes with add_generation_prompt=false; leave one of the two out"
        raise InvalidRequest([FieldViolation(f"{path}.continue_final_message", said)])
    ending = not is_continued if is_begun is None else is_begun, is_continued
    if not chat.HasField("template_variables"):
        return Chat(messages, {}, tools, *ending)
    try:
        variables = MessageToJson(chat.template_variables)
    except ValueError as error:  # a number that JSON has not
        what = FieldViolation(f"{path}.template_variables", str(error))
        raise InvalidRequest([what]) from error
    return Chat(messages, json.loads(variables, parse_float=_number), tools, *ending)


def _chat_message(message: generation_service_pb2.ChatMessage) -> ChatMessage:
    more: dict[str, object] = {}
    if message.tool_calls:
        more["tool_calls"] = [_tool_call(one) for one in message.tool_calls]
    given = {
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning_content,
    }
    more |= {name: value for name, value in given.items() if value}
    has_none = message.tool_calls and not message.HasField("content")
    content = tuple(message.parts) or (None if has_none else message.content)
    return ChatMessage(message.role, content, more)


def _tool_call(call: generation_service_pb2.ToolCall) -> dict[str, object]:
    """Return a call as transformers has it, its arguments by their names."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):  # a model may have written no JSON
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments}
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": function}


def _tool(text: str, path: str) -> dict[str, object]:
    try:
        if isinstance(tool := json.loads(text), dict):
            return tool
        what = "is no JSON object"
    except (ValueError, RecursionError) as error:
        what = f"is no JSON that can be read: {error}"
    raise InvalidRequest([FieldViolation(path, what)])


def _number(text: str) -> int | float:
    """Return a number of a Struct, which has no other than float: a whole one as int."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _prompt(one: generation_service_pb2.Input) -> str | tuple[int, ...]:
    return one.text if one.HasField("text") else tuple(one.tokens.ids)


def _target_prefix(one: generation_service_pb2.Input) -> str | tuple[int, ...]:
    return one.prefix_text if one.HasField("prefix_text") else tuple(one.prefix_tokens.ids)
