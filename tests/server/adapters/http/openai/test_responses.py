"""OpenAI's responses come over HTTP, whole and as the events that its own package reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from pydantic import BaseModel

from tests.conftest import EOS, Script
from tests.fakes.calls import until
from tests.fakes.engines import OPTIONS, FakeGenerator, running_worker
from tests.fakes.http_calls import http_server
from tests.fakes.scripted_server import breaking_stream, scripted_server
from tests.server.adapters.conftest import PLAIN, Serving, client_of

if TYPE_CHECKING:  # as in conftest.py
    import openai
    from openai.types.responses import Response

NOW = {"type": "function", "name": "now", "description": "The time.", "strict": True,
       "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
OF_TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
           "content_part.done", "output_item.done"]  # fmt: skip
OF_CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
           "output_item.done"]  # fmt: skip


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[list[Any], Response]:
    """Return the events of a stream, and the response at its end."""
    stream = await client.responses.create(**asked, stream=True)
    events = [one async for one in stream]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    return events, events[-1].response


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, each once for several after each other."""
    found = [one.type.removeprefix("response.") for one in events]
    return [one for place, one in enumerate(found) if found[place - 1 : place] != [one]]


def plain(response: Response) -> dict[str, Any]:
    """Return what two equal answers have in common: all but ids and the time."""
    said = response.to_dict()
    del said["usage"]["input_tokens_details"]  # the second one finds the prompt in the cache
    for one in (said, *said["output"]):
        one.pop("id")
        one.pop("call_id", None)
    return {**said, "created_at": None}


async def test_a_text_is_answered_whole_and_streamed(
    serving: Serving, spell: Callable[[str], Script]
):
    asked = {"model": "m", "input": "How?", "instructions": "Be brief.", "temperature": 0}
    asked |= {"max_output_tokens": 30, "store": True, "metadata": {"a": "b"}}
    async with serving(spell("So, so"), None, PLAIN) as caller, client_of(caller) as client:
        whole = await client.responses.create(**asked)
        events, last = await streamed(client, **asked)

    assert (whole.output_text, whole.status) == ("So, so", "completed")
    assert (whole.store, whole.instructions, whole.metadata) == (False, "Be brief.", {"a": "b"})
    usage = whole.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (14, 7, 21)
    assert plain(last) == plain(whole)
    assert kinds(events) == ["created", "in_progress", *OF_TEXT, "completed"]
    pieces = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(pieces) == "So, so"
    type(last).model_validate(last.to_dict(), strict=True)


async def test_a_function_is_called_behind_a_text(serving: Serving, spell: Callable[[str], Script]):
    asked = {"model": "m", "input": [{"role": "user", "content": "When?"}], "tools": [NOW]}
    async with serving(spell(f"So\n{CALL}"), "hermes") as caller, client_of(caller) as client:
        whole = await client.responses.create(**asked)
        events, last = await streamed(client, **asked)

    text, call = whole.output
    assert (text.content[0].text, call.type) == ("So\n", "function_call")
    assert (call.name, call.arguments, call.status) == ("now", '{"zone": "UTC"}', "completed")
    assert whole.tools[0].to_dict() == NOW
    assert plain(last) == plain(whole)
    assert kinds(events) == ["created", "in_progress", *OF_TEXT, *OF_CALL, "completed"]
    begun = [one.item for one in events if one.type == "response.output_item.added"]
    assert [one.id for one in begun] == [one.id for one in last.output]


async def test_a_choice_among_functions_holds(serving: Serving, spell: Callable[[str], Script]):
    asked = {"model": "m", "input": "When?", "tools": [NOW]}
    async with serving(spell("No"), "hermes") as caller, client_of(caller) as client:
        named = {"type": "function", "name": "now"}
        forced = await client.responses.create(**asked, tool_choice=named, max_output_tokens=40)
        none = await client.responses.create(**asked, tool_choice="none")
        logprobs: Any = {"include": ["message.output_text.logprobs"]}
        _, alone = await streamed(client, **asked, **logprobs, tool_choice="required")

    assert (forced.output[0].name, forced.tool_choice.to_dict()) == ("now", named)
    assert {one.type for one in alone.output} == {"function_call"}
    assert (none.output_text, none.tool_choice) == ("No", "none")


async def test_an_answer_that_is_cut_is_incomplete(
    serving: Serving, spell: Callable[[str], Script]
):
    asked = {"model": "m", "input": "How?", "max_output_tokens": 3}
    async with serving(spell("So, so"), None, PLAIN) as caller, client_of(caller) as client:
        whole = await client.responses.create(**asked)
        events, last = await streamed(client, **asked)

    assert (whole.output_text, whole.status) == ("So,", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"
    assert plain(last) == plain(whole)
    assert events[-1].type == "response.incomplete"


class Event(BaseModel):
    name: str
    day: int


async def test_an_answer_has_the_form_that_is_asked_for(
    serving: Serving, spell: Callable[[str], Script]
):
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": [5]}}
    async with serving(spell('{"name": "x", "day": 5}'), None, PLAIN) as caller:
        async with client_of(caller) as client:
            asked: Any = {"model": "m", "input": "When?"}
            parsed = await client.responses.parse(**asked, text_format=Event)
            async with client.responses.stream(**asked, text_format=Event) as stream:
                last = await stream.get_final_response()
            held = await client.responses.create(**asked, text={"format": schema})
            free = await client.responses.create(**asked, text={"format": {"type": "json_object"}})

    assert parsed.output_parsed == last.output_parsed == Event(name="x", day=5)
    assert (held.output_text, json.loads(free.output_text)) == ("5", {"name": "x", "day": 5})
    assert held.text.format.to_dict() == schema


async def test_log_probabilities_are_included_if_asked_for(
    serving: Serving, spell: Callable[[str], Script]
):
    asked = {"model": "m", "input": "How?", "include": ["message.output_text.logprobs"]}
    async with serving(spell("So"), None, PLAIN) as caller, client_of(caller) as client:
        whole = await client.responses.create(**asked, top_logprobs=2)
        events, last = await streamed(client, **asked, top_logprobs=2)

    found = whole.output[0].content[0].logprobs
    assert [one.token for one in found] == ["S", "o", "</s>"]
    assert len(found[0].top_logprobs) == 2
    assert plain(last) == plain(whole)
    deltas = [one.logprobs for one in events if one.type == "response.output_text.delta"]
    assert [one.token for found in deltas for one in found] == ["S", "o", "</s>"]


async def test_items_that_come_back_are_the_messages_of_a_chat(serving: Serving):
    prompts: list[str] = []

    def script(source: list[int], tokens: list[int]) -> int:
        prompts.append(bytes(tokens).decode())
        return EOS

    text = {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "id": "fc_1", "call_id": "a1", "name": "now",
            "arguments": '{"x": 1}', "status": "completed"}  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "When?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [text]},
        call,
        {**call, "call_id": "a2"},
        {"type": "function_call_output", "call_id": "a1", "output": "late"},
        {"type": "function_call_output", "call_id": "a2", "output": [{"type": "input_text",
         "text": "later"}]},
    ]  # fmt: skip
    async with serving(script, "hermes") as caller:
        status, found = await caller.post("responses", model="m", input=items, instructions="Be")

    assert (status, found["output"][0]["content"][0]["text"]) == (200, "")
    said = [
        {"id": one, "type": "function", "function": {"name": "now", "arguments": {"x": 1}}}
        for one in ("a1", "a2")
    ]
    assert prompts == [
        f"system:Be;user:When?;assistant:So{json.dumps(said)};toola1:late;toola2:later;>"
    ]


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
    ({"background": True}, "background", "an answer comes to its request alone"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "no templates of prompts"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [{"type": "function"}]}, "tools", 'give {"type": "function", "name"'),
    ({"tools": [NOW], "tool_choice": {"type": "mcp"}}, "tool_choice", "give"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: item_reference is no"),
    ({"input": [{"role": "user"}]}, "input", "input[0]: give"),
    ({"input": []}, "input", "input: give a text, or a list of items"),
    ({"input": None}, "input", "input: give a text, or a list of items"),
    ({"metadata": {"a": math.nan}}, "metadata", "metadata.a"),
    ({"tools": [{**NOW, "parameters": {"x": math.inf}}]}, "tools", "tools[0]: Out of range"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}], "instructions": "x"},
     "input", "input[0].content[0] is of type 'input_image'"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "none"}}}}, "text", "text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"top_p": 7}, "top_p", "top_p"),
    ({"n": 2}, "n", "n is not an option of /v1/responses"),
    ({"max_output_token": 5}, "max_output_token", "the nearest is max_output_tokens"),
    ({"truncation": "auto"}, "truncation", "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort: the model's"),
    ({"model": "none"}, None, "no model"),
]  # fmt: skip


async def test_what_is_not_taken_is_named(serving: Serving, spell: Callable[[str], Script]):
    async with serving(spell("So"), "hermes") as caller:
        for body, param, said in REFUSED:
            status, found = await caller.post("responses", **{"model": "m", "input": "x", **body})

            assert (status, found["error"]["param"]) == (404 if "model" in body else 400, param)
            assert said in found["error"]["message"]


async def test_what_says_the_same_as_nothing_is_taken(
    serving: Serving, spell: Callable[[str], Script]
):
    asked = {"background": False, "previous_response_id": None, "truncation": "disabled"}
    asked |= {"include": [], "tools": [], "tool_choice": "auto", "text": {"verbosity": "medium"}}
    asked |= {"reasoning": {"effort": None, "summary": "auto"}, "prompt_cache_key": "x"}
    asked |= {"max_tool_calls": 2, "top_k": 3, "stop": ["."], "service_tier": "auto"}
    async with serving(spell("So. So"), None, PLAIN) as caller:
        status, found = await caller.post("responses", model="m", input="x", **asked)

    assert (status, found["output"][0]["content"][0]["text"]) == (200, "So")


async def test_an_error_within_a_stream_is_its_last_event():
    full = grpc.StatusCode.RESOURCE_EXHAUSTED, "full"
    with scripted_server() as script:
        script.answers["GenerateStream"], read = breaking_stream("a", *full)
        async with http_server(script.address) as caller, client_of(caller) as client:
            events = []
            async for one in await client.responses.create(model="m", input="x", stream=True):
                events.append(one)
                read.set()

    last = events[-1].response
    assert (events[-1].type, last.status) == ("response.failed", "failed")
    assert (last.error.code, last.error.message) == ("rate_limit_exceeded", "full")
    assert [one.status for one in last.output] == ["incomplete"]


async def test_a_client_that_goes_frees_the_engine():
    generator = FakeGenerator()
    generator.capabilities += (*OPTIONS, "chat")
    async with running_worker(generator) as (_, address):
        async with http_server(address) as caller, client_of(caller) as client:
            stream = await client.responses.create(model="dates", input="ab HOLD", stream=True)
            await generator.seen.wait()
            await stream.close()
            await until(lambda: generator.aborted)
