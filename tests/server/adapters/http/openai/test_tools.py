"""Functions are called over HTTP by a model that is held to them, and what came of it goes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest

from engine.text.chat_format import ToolFormat
from tests.conftest import EOS, VOCAB_SIZE, Script
from tests.server.adapters.conftest import PLAIN, TEMPLATE, Serving, client_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "unit": {"$ref": "#/$defs/Unit"},
                "days": {"type": "integer"},
            },
            "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
SCHEMAS = {"get_weather": WEATHER["function"]["parameters"], "now": {"maxProperties": 0}}
ASKED = [{"role": "user", "content": "How is it in Rome"}]


def at_random(source: list[int], tokens: list[int]) -> np.ndarray:
    """Like any byte as well as another, and the end a little more."""
    row = np.random.default_rng(len(tokens)).normal(size=VOCAB_SIZE).astype(np.float32)
    row[EOS] += 2
    return row


def whole(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Return content, the id, name and arguments of the calls, and the end of a stream."""
    content, calls, reason = "", [], ""
    for choice in (one.choices[0] for one in chunks if one.choices):
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                calls.append([call.id, call.function.name, call.function.arguments])
            else:
                calls[call.index][2] += call.function.arguments
    return content, calls, reason


@pytest.mark.parametrize("form", get_args(ToolFormat))
@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [("required", {"get_weather", "now"}, "tool_calls"),
     ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, "stop"),
     ({"type": "function", "function": {"name": "now"}}, {"now"}, "stop")],
)  # fmt: skip
async def test_a_model_that_has_to_call_a_function_calls_it_well(
    form: ToolFormat, choice: Any, names: set[str], reason: str, serving: Serving
):
    asked = {"model": "m", "messages": ASKED, "tools": [WEATHER, NOW], "tool_choice": choice}
    async with serving(at_random, form) as caller, client_of(caller) as client:
        for seed in range(3):
            drawn = {**asked, "temperature": 1, "seed": seed}
            answer = await client.chat.completions.create(**drawn)
            stream = await client.chat.completions.create(**drawn, stream=True)
            content, calls, end = whole([one async for one in stream])

            (said,) = answer.choices
            found = [(one.function.name, one.function.arguments) for one in said.message.tool_calls]
            assert (said.message.content, content) == (None, "")
            assert (said.finish_reason, end) == (reason, reason)
            assert [(name, arguments) for _, name, arguments in calls] == found
            for name, arguments in found:
                assert name in names
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])


WRITTEN: dict[ToolFormat, str] = {
    "hermes": 'So\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
}


@pytest.mark.parametrize("form", get_args(ToolFormat))
async def test_what_a_model_writes_of_itself_is_read(
    form: ToolFormat, serving: Serving, spell: Callable[[str], Script]
):
    asked = {"model": "m", "messages": ASKED, "tools": [WEATHER, NOW]}
    async with serving(spell(WRITTEN[form]), form) as caller, client_of(caller) as client:
        (said,) = (await client.chat.completions.create(**asked)).choices
        one = await client.chat.completions.create(**asked, parallel_tool_calls=False)
        stream = await client.chat.completions.create(**asked, stream=True, logprobs=True)
        chunks = [one async for one in stream]
        none = await client.chat.completions.create(**asked, tool_choice="none")

    content, calls, reason = whole(chunks)
    assert (said.message.content or "", said.finish_reason) == (content, "tool_calls")
    assert content == ("So\n" if form == "hermes" else "")
    assert [one.function.name for one in said.message.tool_calls] == [one[1] for one in calls]
    assert [one[2] for one in calls] == ["{}"] * (2 if form == "llama3_json" else 1)
    assert reason == "tool_calls"
    assert len(one.choices[0].message.tool_calls) == 1
    positions = [one.choices[0].logprobs for one in chunks]
    tokens = [token.token for found in positions if found for token in found.content]
    assert "".join(tokens) == f"{WRITTEN[form]}</s>"
    assert none.choices[0].message.content == WRITTEN[form]
    assert none.choices[0].message.tool_calls is None


@pytest.mark.parametrize("form", get_args(ToolFormat))
async def test_a_call_that_is_cut_before_its_name_is_no_content(
    form: ToolFormat, serving: Serving, spell: Callable[[str], Script]
):
    asked = {"model": "m", "messages": ASKED, "tools": [NOW], "tool_choice": "required"}
    async with serving(spell("x"), form) as caller, client_of(caller) as client:
        for size in (1, 9, 20):
            (said,) = (await client.chat.completions.create(**asked, max_tokens=size)).choices
            stream = await client.chat.completions.create(**asked, max_tokens=size, stream=True)
            content, *_ = whole([one async for one in stream])
            assert (said.message.content or "", content) == ("", "")
            assert said.finish_reason == "length"

    marked = WRITTEN[form].removeprefix("So\n")
    if form != "llama3_json":  # its calls have no mark
        free = {"model": "m", "messages": ASKED, "tools": [NOW], "max_tokens": 15}
        async with serving(spell(marked), form) as caller, client_of(caller) as client:
            (said,) = (await client.chat.completions.create(**free)).choices
        assert (said.message.content, said.finish_reason) == ("", "length")


async def test_a_plain_answer_is_content(serving: Serving, spell: Callable[[str], Script]):
    asked = {"model": "m", "messages": ASKED, "tools": [NOW]}
    async with serving(spell("It is late < you see"), "hermes") as caller:
        async with client_of(caller) as client:
            (said,) = (await client.chat.completions.create(**asked)).choices
            stream = await client.chat.completions.create(**asked, stream=True)
            content, calls, reason = whole([one async for one in stream])

    assert (said.message.content, said.finish_reason) == ("It is late < you see", "stop")
    assert said.message.tool_calls is None
    assert (content, calls, reason) == ("It is late < you see", [], "stop")


async def test_an_answer_may_be_json_or_a_call(serving: Serving, spell: Callable[[str], Script]):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"model": "m", "messages": ASKED, "tools": [NOW], "response_format": form}
    for text, content, count in (('{"a": 5}', '{"a": 5}', 0), (WRITTEN["hermes"][3:], None, 1)):
        async with serving(spell(text), "hermes") as caller:
            _, found = await caller.post("chat/completions", **asked)
        message = found["choices"][0]["message"]
        assert (message["content"], len(message.get("tool_calls", ()))) == (content, count)
    async with serving(at_random, "hermes") as caller:
        _, found = await caller.post("chat/completions", **asked)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls" or json.loads(choice["message"]["content"])


async def test_a_conversation_with_calls_is_told_by_the_template_as_transformers_has_it(
    serving: Serving,
):
    prompts: list[str] = []

    def script(source: list[int], tokens: list[int]) -> int:
        if tokens[-1] == ord(">"):
            prompts.append(bytes(tokens).decode())
        return EOS

    call = {"id": "a1", "type": "function", "function": {"name": "now", "arguments": '{"x": [1]}'}}
    said = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "late", "tool_call_id": "a1", "name": "now"},
        {"role": "assistant", "content": "x", "tool_calls": [
            {"id": "a2", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}]},
    ]  # fmt: skip
    async with serving(script, "hermes") as caller:
        status, found = await caller.post(
            "chat/completions", model="m", messages=said, tools=[WEATHER]
        )

    assert (status, found["choices"][0]["message"]["content"]) == (200, "")
    (prompt,) = prompts
    assert prompt == (
        f"{json.dumps([WEATHER])}user:How is it in Rome;"
        'assistant:[{"id": "a1", "type": "function", "function": {"name": "now", "arguments": '
        '{"x": [1]}}}];toola1now:late;'
        'assistant:x[{"id": "a2", "type": "function", "function": {"name": "f", "arguments": '
        '"no JSON"}}];>'
    )


REFUSED = [
    (PLAIN, None, {}, "tools: the chat template of m knows none, or writes calls in another "
     "format than hermes, llama3_json, mistral; leave them out, take another model, or say "
     "tool_format in chat.json of its checkpoint and export it again", "tools"),
    (PLAIN, "hermes", {}, "tools: the model's chat template knows no tools; leave them out, or "
     "take another model", "tools"),
    (TEMPLATE, "hermes", {"tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice: x is none of the tools", "tool_choice"),
    (TEMPLATE, "hermes", {"tool_choice": "required", "guided_regex": "a"},
     "regex: calls are required; leave one of the two out", "regex"),
    (TEMPLATE, "hermes", {"tool_choice": "required", "tools": [{"type": "function", "function": {
     "name": "x", "parameters": {"properties": {"a": {"type": "none"}}}}}]},
     "tools: failed to compile JSON schema: Invalid type: none", "tools"),
    (TEMPLATE, "hermes", {"tools": [{"type": "function", "function": {"name": "x", "parameters":
     5}}]}, "tools[0]: ", "tools"),
    (TEMPLATE, "hermes", {"model": "none"}, "no model 'none' is served here; /v1/models lists "
     "them", None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "form", "body", "said", "param"), REFUSED)
async def test_what_cannot_be_called_is_named(
    template: str, form: ToolFormat, body: Any, said: str, param: str, serving: Serving
):
    asked = {"model": "m", "messages": ASKED, "tools": [NOW], **body}
    async with serving(at_random, form, template) as caller:
        status, found = await caller.post("chat/completions", **asked)

    assert status == (404 if "model" in body else 400)
    assert found["error"]["message"].startswith(said)
    assert found["error"]["param"] == param


async def test_calls_of_before_are_refused_by_a_template_that_would_leave_them_out(
    serving: Serving,
):
    call = {"id": "a1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with serving(at_random, None, PLAIN) as caller:
        status, found = await caller.post("chat/completions", model="m", messages=said)

    assert status == 400
    assert "knows no tool_calls" in found["error"]["message"]
