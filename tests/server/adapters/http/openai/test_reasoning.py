"""Reasoning is told apart from the answer, where the chat template of the model marks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server.adapters.http.openai.reasoning import ReasoningReader
from tests.conftest import EOS, Script
from tests.server.adapters.conftest import PLAIN, Serving, client_of

MARKED = """{{ tools | tojson if tools }}{% for m in messages %}
{{- m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content if m.content is not none }};
{%- endfor %}>"""
BEGUN = MARKED + "{% if enable_thinking is not false %}<think>\n{% endif %}"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "How?"}]}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]


LOGPROBS = {"include": ["message.output_text.logprobs"]}


def whole(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    """Return reasoning and content of the deltas of an answer."""
    names = ("reasoning_content", "content")
    first, second = ("".join(one.get(name) or "" for one in deltas) for name in names)
    return first, second


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "is_begun", "thought", "said"),
    [("\n<think>\nWell < </thi a\n</think>\n\nSo <think>", False, "Well < </thi a", "So <think>"),
     ("Well\n</think>So", True, "Well", "So"),
     ("<think></think>So", False, "", "So"),
     ("So </think>", False, "", "So </think>"),
     ("<thin", False, "", "<thin"),
     ("<think>Well </thin", False, "Well </thin", ""),
     ("<think>Well \n", False, "Well", ""),
     ("Well", True, "Well", ""),
     ("", True, "", "")],
)  # fmt: skip
def test_marks_are_found_however_they_come(
    size: int, text: str, is_begun: bool, thought: str, said: str
):
    reader = ReasoningReader(None, is_begun=is_begun)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in reader.push(piece)]

    assert whole(deltas + reader.finish()) == (thought, said)


async def test_reasoning_is_told_apart_whole_and_streamed(
    serving: Serving, spell: Callable[[str], Script]
):
    text = "<think>\nWell\n</think>\n\nSo"
    for template in (MARKED, BEGUN):  # the script's beginning is in the prompt of the latter
        async with serving(spell(text), None, template) as caller:
            _, found = await caller.post("chat/completions", **ASKED)
            *chunks, _ = await caller.stream("chat/completions", **ASKED)
            async with client_of(caller) as client:
                response = await client.responses.create(model="m", input="How?")
                asked: Any = {"model": "m", "input": "How?", "stream": True}
                events = [one async for one in await client.responses.create(**asked)]

        message = found["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Well", "So")
        assert whole([one["choices"][0]["delta"] for one in chunks]) == ("Well", "So")
        assert response.output[0].content[0].text == "Well"
        assert response.output_text == events[-1].response.output_text == "So"
        assert "response.reasoning_text.done" in [one.type for one in events]


@pytest.mark.parametrize(("text", "thought"), [("<thin", ""), ("<think>\nWell </thin", "Well")])
async def test_a_mark_that_is_cut_is_left_out(
    text: str, thought: str, serving: Serving, spell: Callable[[str], Script]
):
    async with serving(spell(text + "?"), None, MARKED) as caller:
        asked: Any = {**ASKED, "max_tokens": len(text)}
        _, found = await caller.post("chat/completions", **asked)
        *chunks, _ = await caller.stream("chat/completions", **asked)

    (choice,) = found["choices"]
    assert whole([choice["message"]]) == (thought, "")
    assert whole([one["choices"][0]["delta"] for one in chunks]) == (thought, "")
    assert choice["finish_reason"] == "length"


async def test_log_probabilities_of_a_response_are_of_its_texts_alone(
    serving: Serving, spell: Callable[[str], Script]
):
    asked: Any = {"model": "m", "input": "How?", "tools": [{"type": "function", "name": "now"}]}
    text = f"<think>\nWell\n</think>\n\nSo\n{CALL}\nEnd"
    async with serving(spell(text), "hermes", MARKED) as caller, client_of(caller) as client:
        response = await client.responses.create(**asked, **LOGPROBS)
        stream = await client.responses.create(**asked, **LOGPROBS, stream=True)
        *_, last = [one async for one in stream]
        _, chat = await caller.post("chat/completions", **ASKED, tools=TOOLS, logprobs=True)
        *chunks, _ = await caller.stream("chat/completions", **ASKED, tools=TOOLS, logprobs=True)

    kinds = ["reasoning", "message", "function_call", "message"]
    for found in (response, last.response):
        assert [one.type for one in found.output] == kinds
        _, so, _, end = found.output
        assert (so.content[0].text, end.content[0].text.strip()) == ("So\n", "End")
        assert "".join(one.token for one in so.content[0].logprobs) == "So\n"
        assert "".join(one.token for one in end.content[0].logprobs) == "\nEnd</s>"
        assert found.usage.output_tokens_details.reasoning_tokens == len("\nWell\n")
    logprobs = [chat["choices"][0]["logprobs"], *(one["choices"][0]["logprobs"] for one in chunks)]
    said, *told = ["".join(token["token"] for token in one["content"]) for one in logprobs if one]
    assert said == "".join(told) == f"{text}</s>"


async def test_log_probabilities_stand_beside_their_text_behind_bytes_of_no_character(
    serving: Serving,
):
    answer = [*b"<think>\xffWell</think>So", EOS]

    def script(source: list[int], tokens: list[int]) -> int:
        return answer[min(len(tokens) - tokens.index(ord(">")) - 1, len(answer) - 1)]

    async with serving(script, None, MARKED) as caller, client_of(caller) as client:
        response = await client.responses.create(model="m", input="How?", **LOGPROBS)

    thought, said = (one.content[0] for one in response.output)
    assert (thought.text, said.text) == ("\ufffdWell", "So")
    assert [one.token for one in said.logprobs] == ["S", "o", "</s>"]


@pytest.mark.parametrize(
    ("template", "text", "count"),
    [(MARKED, "<think>Well</think>So", 4),
     (BEGUN, "<think>\nWell</think>So", 4),  # the prompt has the mark
     (MARKED, "So <think>Well</think>", 0),
     (MARKED, "<think>Well", 4),
     (PLAIN, "<think>Well</think>So", 0)],
)  # fmt: skip
async def test_tokens_of_reasoning_are_counted(
    template: str, text: str, count: int, serving: Serving, spell: Callable[[str], Script]
):
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with serving(spell(text), None, template) as caller:
        _, found = await caller.post("chat/completions", **ASKED)
        first, *_, last, _ = await caller.stream("chat/completions", **ASKED, **usage)

    for one in (found, last):
        assert one["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    assert "completion_tokens_details" not in first["usage"]  # it is not known yet


@pytest.mark.parametrize(
    ("given", "thought", "said"),
    [("<think>We", "ll", "So"), ("<think>No</think>We", "", "ll</think>So")],
)
async def test_reasoning_goes_on_where_the_last_message_is_continued_within_it(
    given: str, thought: str, said: str, serving: Serving
):
    answer = [*b"ll</think>So", EOS]

    def script(source: list[int], tokens: list[int]) -> int:
        return answer[min(len(tokens) - bytes(tokens).index(b"We") - 2, len(answer) - 1)]

    messages = [*ASKED["messages"], {"role": "assistant", "content": given}]
    asked = {"model": "m", "messages": messages, "continue_final_message": True}
    async with serving(script, None, MARKED) as caller:
        _, found = await caller.post("chat/completions", **asked)

    assert whole([found["choices"][0]["message"]]) == (thought, said)


@pytest.mark.parametrize(("given", "count"), [("<think>We", 2), ("<think>Well</think>S", 0)])
async def test_given_tokens_of_reasoning_are_not_counted(
    given: str, count: int, serving: Serving, spell: Callable[[str], Script]
):
    async with serving(spell("<think>Well</think>So"), None, MARKED) as caller:
        _, found = await caller.post("chat/completions", **ASKED, target_prefix=given)

    assert found["choices"][0]["message"]["reasoning_content"] == "Well"
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


async def test_calls_of_functions_stand_behind_reasoning(
    serving: Serving, spell: Callable[[str], Script]
):
    async with serving(spell(f"<think>Well</think>\n{CALL}"), "hermes", MARKED) as caller:
        _, found = await caller.post("chat/completions", **ASKED, tools=TOOLS)
        _, forced = await caller.post(
            "chat/completions", **ASKED, tools=TOOLS, tool_choice="required", max_tokens=60
        )

    (choice,) = found["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Well", None)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert choice["finish_reason"] == "tool_calls"
    assert "reasoning_content" not in forced["choices"][0]["message"]


async def test_nothing_is_told_apart_where_there_is_no_reasoning(
    serving: Serving, spell: Callable[[str], Script]
):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [5]}}}
    async with serving(spell("<think>\n</think>So"), None, BEGUN) as caller:
        _, plain = await caller.post("chat/completions", **ASKED, enable_thinking=False)
        _, kept = await caller.post(
            "chat/completions", **ASKED, enable_thinking=True, separate_reasoning=False
        )
        _, held = await caller.post("chat/completions", **ASKED, response_format=schema)
    async with serving(spell("<think>a</think>"), None, PLAIN) as caller:
        _, other = await caller.post("chat/completions", **ASKED)

    said = [one["choices"][0]["message"]["content"] for one in (plain, kept, held, other)]
    assert said == ["So", "</think>So", "5", "<think>a</think>"]


async def test_reasoning_comes_back_to_a_template_that_shows_it(serving: Serving):
    prompts: list[str] = []

    def script(source: list[int], tokens: list[int]) -> int:
        prompts.append(bytes(tokens).decode())
        return EOS

    thoughts = [{"type": "reasoning_text", "text": text} for text in ("We", "ll")]
    answer = {"role": "assistant", "content": "So", "reasoning_content": "Well"}
    user = ASKED["messages"][0]
    items = [user, *({"type": "reasoning", "id": "r", "summary": [], "content": [thought]}
                     for thought in thoughts),
             {"role": "assistant", "content": "So"}, user]  # fmt: skip
    async with serving(script, None, MARKED) as caller:
        await caller.post("chat/completions", model="m", messages=[user, answer, user])
        await caller.post("responses", model="m", input=items)

    assert prompts == ["user:How?;assistant:<think>Well</think>So;user:How?;>"] * 2
