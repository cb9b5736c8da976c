"""Turns a conversation, as clients of chat APIs write it, into the protocol's Chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenweir._mapping import set_field
from tokenweir._options import Chat
from tokenweir.v1 import generation_service_pb2 as pb

# Beside them a field may be null, false or empty, as if it were not there.
_SAID = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
# No chat template that is known reads them, and servers write them into what is sent back.
_UNREAD = ("annotations", "id", "name", "parsed", "reasoning")
# A message of protobuf is at most 100 deep, and an object in another one takes three of them.
_MAX_DEPTH = 24


def chat_message(
    chat: Chat,
    variables: Mapping[str, object] | None,
    tools: Sequence[Mapping[str, object]] | None,
    argument: str,
) -> pb.Chat:
    """Return a conversation; TypeError or ValueError names the field that cannot be sent."""
    found = pb.Chat()
    for place, message in enumerate(chat):
        _add(found.messages.add(), message, f"{argument}[{place}]")
    for place, tool in enumerate(tools or ()):
        found.tools.append(_json(tool, f"tools[{place}]"))
    if variables:
        if not isinstance(variables, Mapping):
            raise TypeError(
                f"chat_template_kwargs={variables!r:.300}: give a mapping of names to values"
            )
        if _is_deeper(variables, _MAX_DEPTH):
            raise ValueError(
                f"chat_template_kwargs is nested more than {_MAX_DEPTH} deep; give flatter values"
            )
        try:
            found.template_variables.update(dict(variables))  # type: ignore[arg-type]  # checked by protobuf
        except (TypeError, ValueError) as error:
            raise ValueError(f"chat_template_kwargs={variables!r:.300}: {error}") from None
    return found


def _is_deeper(value: object, most: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return most == 0 or any(_is_deeper(one, most - 1) for one in value)


def _add(added: pb.ChatMessage, message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} is no message; a message has role and content")
    for name, value in message.items():
        if name not in _SAID and name not in _UNREAD and not _is_absent(value):
            raise ValueError(f"{where}.{name} cannot be sent; a message has role and content")
    role = _given(message, "role", where)
    set_field(added, "role", role, f"{where}.role")
    set_field(added, "tool_call_id", message.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "tool":  # the function's; of nobody else a template reads it
        set_field(added, "name", message.get("name"), f"{where}.name")
    thought = message.get("reasoning_content") or None
    set_field(added, "reasoning_content", thought, f"{where}.reasoning_content")
    if calls := message.get("tool_calls"):
        _add_calls(added, calls, f"{where}.tool_calls")
        if message.get("content") is None:
            return
    content = _given(message, "content", where)
    if isinstance(content, str):
        set_field(added, "content", content, f"{where}.content")
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for place, part in enumerate(content):
            found = f"{where}.content[{place}]"
            set_field(added, "parts", [_text_of(part, found)], f"{found}.text")
    else:
        raise TypeError(f"{where}.content={content!r:.300}: give a text, or a list of parts")


def _add_calls(added: pb.ChatMessage, calls: object, where: str) -> None:
    if not isinstance(calls, Sequence):
        raise TypeError(f"{where} is no list of calls")
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TypeError(f"{where}[{place}] is no call of a function; one has id and function")
        found, named = added.tool_calls.add(), f"{where}[{place}].function"
        set_field(found, "id", call.get("id"), f"{where}[{place}].id")
        set_field(found, "name", _given(function, "name", named), f"{named}.name")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, Mapping):
            arguments = _json(arguments, f"{named}.arguments")
        set_field(found, "arguments", arguments, f"{named}.arguments")


def _json(value: object, where: str) -> str:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}={value!r:.300}: give a mapping")
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}={value!r:.300}: {error}") from None


def _given(message: Mapping[str, object], name: str, where: str) -> object:
    value = message.get(name)
    if value is None or value == []:
        raise TypeError(f"{where}.{name} is missing; a message has role and content")
    return value


def _text_of(part: object, where: str) -> str:
    """Return the text of a part; what stands beside it, such as for caches, says nothing more."""
    if not isinstance(part, Mapping):
        raise TypeError(f'{where} is no part; one is {{"type": "text", "text": ...}}')
    if part.get("type") != "text":
        raise ValueError(f"{where} is of type {part.get('type')!r:.300}; only texts can be sent")
    if not isinstance(text := part.get("text"), str):
        raise TypeError(f"{where}.text is {text!r:.300}; give a text")
    return text


def _is_absent(value: object) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}
