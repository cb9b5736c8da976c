"""The HTTP server answers OpenAI's protocol, before a real worker of fakes or a scripted one."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import re
import struct
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from prometheus_client.parser import text_string_to_metric_families
from tokenweir import PositionLogprobs, TokenLogprob

from engine.requests.request import Constraint
from loadtest.target.openai_http import OpenAiHttp
from loadtest.work.ask import Ask
from server.adapters.config import HttpConfig
from server.adapters.http.openai.answers import Form, finish_reason
from server.adapters.http.openai.chat import ChatForm, ChatRequest
from server.adapters.http.openai.completions import CompletionRequest, TextForm
from server.adapters.http.requests import INSTEAD
from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.settings import Auth
from tests.fakes.calls import until
from tests.fakes.engines import (
    FakeGenerator,
    FakePredictor,
    able,
    generation_package,
    prediction_package,
    running_worker,
)
from tests.fakes.gateways import entry
from tests.fakes.http_calls import Caller, http_server
from tests.fakes.scripted_server import (
    ScriptedServer,
    breaking_stream,
    fail,
    scripted_server,
    stream_messages,
)

CLIENTS = Path(__file__).parents[4] / "server/docs/reference/clients.md"
_TEXTS = TextForm(CompletionRequest(model="m", prompt=["a"]))
_CHATS = ChatForm(ChatRequest(model="m", messages=[{}]))


@asynccontextmanager
async def http_before(*engines: Any, config: HttpConfig | None = None) -> AsyncIterator[Caller]:
    async with running_worker(*engines) as (_, address):
        async with http_server(address, config) as caller:
            yield caller


async def test_a_text_is_completed_with_what_it_took():
    async with http_before(FakeGenerator()) as caller:
        status, found = await caller.post(model="dates", prompt="ab cde", max_tokens=5)

    assert status == 200
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "ab cde ", "logprobs": None, "finish_reason": "stop"}
    ]
    assert found["usage"]["prompt_tokens"] == 2
    assert found["usage"]["completion_tokens"] == 2
    assert found["usage"]["total_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a", ["a "]), ([4, 5], ["4 5 "]), (["a", "b c"], ["a ", "b c "]), ([[4], [5]], ["4 ", "5 "])],
)
async def test_prompts_may_be_texts_or_token_ids(prompt: object, texts: list[str]):
    async with http_before(FakeGenerator()) as caller:
        _, found = await caller.post(model="dates", prompt=prompt)

    assert [one["text"] for one in found["choices"]] == texts
    assert [one["index"] for one in found["choices"]] == list(range(len(texts)))


async def test_options_reach_the_engine():
    generator = able()
    said = {"temperature": 0.5, "top_p": 0.75, "seed": 7, "n": 2, "stop": ["x"], "max_tokens": 9}
    said |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"5": -3}}

    async with http_before(generator) as caller:
        status, found = await caller.post(
            model="dates", prompt="a", logprobs=2, top_k=3, user="me", echo=False, **said
        )

    assert status == 200
    assert len(found["choices"]) == 2
    params = generator.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.75, 3, 7)
    assert (params.num_outputs, params.max_new_tokens, params.logprobs) == (2, 9, 2)
    assert (params.controls.presence_penalty, params.controls.frequency_penalty) == (0.5, 0.25)
    assert found["choices"][0]["logprobs"]["token_logprobs"] == [-2.0]
    assert found["choices"][0]["logprobs"]["tokens"] == ["<1>"]
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [
        {"<90>": -1.0, "<91>": -2.0, "<1>": -2.0}
    ]


async def test_temperature_zero_is_the_most_likely_token():
    generator = FakeGenerator()

    async with http_before(generator) as caller:
        await caller.post(model="dates", prompt="a", temperature=0, top_p=1, seed=3)

    assert generator.requests[0].params.strategy == "greedy"


@pytest.mark.parametrize("is_told_all_along", [False, True])
async def test_a_stream_has_the_pieces_the_end_and_what_it_took(is_told_all_along: bool):
    details = {"include_usage": True, "continuous_usage_stats": is_told_all_along}
    async with http_before(able()) as caller:
        events = await caller.stream(
            model="dates", prompt="ab c", stream_options=details, logprobs=0
        )

    assert events[-1] == "[DONE]"
    *pieces, end, usage = events[:-1]
    assert "".join(one["choices"][0]["text"] for one in pieces) == "ab c "
    assert [one["choices"][0]["finish_reason"] for one in (*pieces, end)][-1] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
    so_far = [one["usage"]["completion_tokens"] for one in (*pieces, end) if "usage" in one]
    assert so_far == ([1, 2, 2] if is_told_all_along else [])
    assert {one["usage"]["prompt_tokens"] for one in events[:-1] if "usage" in one} == {2}
    assert len({one["id"] for one in events[:-1]}) == 1


async def test_a_stream_of_several_prompts_tells_them_apart():
    async with http_before(able()) as caller:
        events = await caller.stream(
            model="dates", prompt=["ab c", "d"], n=2, stream_options={"include_usage": True}
        )

    assert events[-1] == "[DONE]"
    *pieces, usage = events[:-1]
    choices = [one["choices"][0] for one in pieces]
    texts = ["".join(one["text"] for one in choices if one["index"] == i) for i in range(4)]
    assert texts == ["ab c ", "ab c ", "d ", "d "]
    assert sorted(one["index"] for one in choices if one["finish_reason"] == "stop") == [*range(4)]
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 3)


async def test_one_of_several_streams_that_fails_ends_all_of_them():
    def answer(request: Any, context: grpc.ServicerContext) -> object:
        yield next(iter(stream_messages(["a"])))
        both.wait(60)
        if request.request.inputs[0].text == "b":
            fail(context, grpc.StatusCode.INTERNAL, "inputs[0].text: gone")
        if not context.add_callback(ended.set):  # it has ended already
            ended.set()
        ended.wait(60)

    both, ended = threading.Barrier(3), threading.Event()
    with scripted_server() as script:
        script.answers["GenerateStream"] = answer
        async with http_server(script.address) as caller:
            body = {"model": "m", "prompt": ["a", "b"], "stream": True}
            async with caller.session.post(f"{caller.url}/v1/completions", json=body) as found:
                await found.content.readuntil(b"\n\n")
                await asyncio.to_thread(both.wait, 60)
                last = (await found.text()).strip().rpartition("data: ")[2]

    assert json.loads(last)["error"]["message"] == "prompt[1]: gone"
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_stream_answers_at_once_and_is_never_silent():
    generator = able()
    config = HttpConfig(port=0, ping_seconds=0.05, grace=1)
    async with http_before(generator, config=config) as caller:
        body = {"model": "dates", "prompt": "HOLD", "beam": 4, "stream": True}
        async with caller.session.post(f"{caller.url}/v1/completions", json=body) as found:
            assert (found.status, generator.release.is_set()) == (200, False)
            pings = [await found.content.readexactly(8) for _ in range(3)]
            generator.release.set()
            rest = await found.text()

    assert pings == [b": ping\n\n"] * 3
    assert rest.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_stream_that_waits_for_its_turn_answers_after_a_while(is_refused: bool):
    def answer(request: object, context: grpc.ServicerContext) -> object:
        answered.wait(60)
        if is_refused:
            fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield from stream_messages(["a"])

    answered = threading.Event()
    config = HttpConfig(port=0, ping_seconds=0.05, grace=1)
    with scripted_server() as script:
        script.answers["GenerateStream"] = answer
        async with http_server(script.address, config) as caller:
            body = {"model": "m", "prompt": "a", "stream": True}
            async with caller.session.post(f"{caller.url}/v1/completions", json=body) as found:
                assert found.status == 200
                assert await found.content.readexactly(8) == b": ping\n\n"
                answered.set()
                rest = (await found.text()).replace(": ping\n\n", "")

    assert ('"message":"full"' in rest, "[DONE]" in rest) == (is_refused, not is_refused)


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [((), "http://a", None), (("http://a",), "http://a", "http://a"),
     (("http://a",), "http://b", None), (("*",), "http://b", "*")],
)  # fmt: skip
async def test_pages_of_other_origins_ask_where_they_may(
    origins: tuple[str, ...], origin: str, allowed: str | None
):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    config = HttpConfig(port=0, allowed_origins=origins, grace=1)
    async with http_before(FakeGenerator(), config=config) as caller:
        url = f"{caller.url}/v1/chat/completions"
        async with caller.session.options(url, headers=asked) as found:
            assert found.status == (200 if allowed else 400 if origins else 405)
            assert found.headers.get("Access-Control-Allow-Origin") == allowed
        for path, status in (("/v1/models", 200), ("/v1/models/", 200), ("/v1/models/x", 404)):
            async with caller.session.get(caller.url + path, headers=asked) as found:
                assert found.status == status
                assert found.headers.get("Access-Control-Allow-Origin") == allowed


async def test_a_stream_of_beams_has_the_best_one():
    async with http_before(able()) as caller:
        events = await caller.stream(model="dates", prompt="ab c", beam=4)

    assert [one["choices"][0]["text"] for one in events[:-1]] == ["ab c ", ""]


WRONG = [
    ({"suffix": "b"}, "suffix is not an option of this server; leave it out", "suffix"),
    ({"max_tokns": 5}, "max_tokns is not an option of this server; the nearest is max_tokens",
     "max_tokns"),
    ({"tenant": "me"}, "tenant is not an option of this server; leave it out", "tenant"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: 21 is outside 0 to 20 alternatives; 0 gives the "
     "chosen token's", "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs is for answers that are no stream; "
     "leave one of them out", "prompt_logprobs"),
    ({"prompt_token_ids": True}, "prompt_token_ids is not an option of this server; the nearest "
     "is return_token_ids", "prompt_token_ids"),
    ({"priority": 3}, "priority=3 is not an option of this server; leave it out", "priority"),
    ({"stream_options": {"continuous_usage": True}}, "stream_options.continuous_usage is not an "
     "option of this server; the nearest is continuous_usage_stats", "stream_options"),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer", "max_tokens"),
    ({"prompt": []}, "prompt: give a text or token ids, or a list of the one or the other, not "
     "an empty one", "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt: 2,049 are more than 2,048; send fewer", "prompt"),
    ({"prompt": ["a"] * 70 + [""]}, "prompt[70]: it is empty", "prompt"),
    ({"prompt": None}, "prompt: give a text or token ids, or a list of the one or the other, "
     "not an empty one", "prompt"),
    ({"stop": 5}, "stop: give a text, or a list of texts", "stop"),
    ({"stop": ["a", ""]}, "stop[1]: 0 characters are outside 1 to 256", "stop"),
    ({"top_p": 7}, "top_p: 7 is outside (0, 1]; 1 means all", "top_p"),
    ({"n": 99, "top_p": 1}, "n: 99 is outside 1 to 8", "n"),
    ({"max_tokens": -1}, "max_tokens: -1 is below 0; leave it out for the model's limit",
     "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens: 3 is outside 0 to max_tokens (2)",
     "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x: Input should be a valid integer, unable to parse "
     "string as an integer", "logit_bias"),
    ({"prompt": ["a"] * 65, "stream": True}, "65 streams are more than 64; send fewer prompts",
     "prompt"),
    ({"prompt": ["a", "", "b"], "stream": True}, "prompt[1]: it is empty", "prompt"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json, guided_regex: give one of them "
     "only", "guided_json"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "what the answer must be is "
     "said twice; say it once", None),
    ({"structured_outputs": {"json": 5}}, "structured_outputs=5: give a text",
     "structured_outputs"),
    ({"top_k": "5"}, "top_k='5': give a whole number", "top_k"),
    ({"min_p": "a"}, "min_p='a': give a number", "min_p"),
    ({"ignore_eos": "yes"}, "ignore_eos='yes': give true or false", "ignore_eos"),
    ({"structured_outputs": {"jsn": {}, "jso": {"a": 1}}}, "structured_outputs.jso is not an "
     "option of this server; the nearest is json", "structured_outputs"),
    ({"do_sample": False}, "do_sample=false is not an option of this server; leave it out",
     "do_sample"),
    ({"use_beam_search": True}, "use_beam_search is not an option of this server; send beam in its "
     "place", "use_beam_search"),
    ({"skip_special_token": False}, "skip_special_token is not an option of this server; the "
     "nearest is skip_special_tokens", "skip_special_token"),
    ({"max_tokns": 0}, "max_tokns is not an option of this server; the nearest is max_tokens",
     "max_tokns"),
    ({f"x{i}": None for i in range(999)}, "it has 999 fields that are not known; leave them out",
     None),
    ({"x" * 200: 1}, "x" * 200 + " is not an option of this server; leave it out", "x" * 200),
    ({"seed": -2}, "seed=-2 is outside 0 to 18446744073709551615", "seed"),
    ({"seed": -2, "stream": True}, "seed=-2 is outside 0 to 18446744073709551615", "seed"),
]  # fmt: skip


async def test_what_is_wrong_is_named_as_it_was_sent():
    async with http_before(able()) as caller:
        for body, said, param in WRONG:
            status, found = await caller.post(**{"model": "dates", "prompt": "a", **body})
            assert (status, found["error"]["message"], found["error"]["param"]) == (
                400,
                said,
                param,
            )
            assert found["error"]["type"] == "invalid_request_error"


NOTHING = [
    *({name: None} for name in ("max_tokens", "stop", "response_format", "whatever")),
    *({name: False} for name in ("echo", "use_beam_search", "timings_per_token", "stream")),
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"add_generation_prompt": True, "include_stop_str_in_output": False},
    {"cache_prompt": True, "priority": 0, "length_penalty": 1.0, "n": 1, "best_of": 1},
    {"tools": [], "tool_choice": "auto", "functions": [], "suffix": "", "stop": []},
    {"tools": [{"type": "function"}], "tool_choice": "none", "logit_bias": {}},
    {"include_reasoning": True, "separate_reasoning": True, "verbosity": "medium"},
    {"repeat_penalty": 1, "top_logprobs": 0, "seed": -1},
    {"stream_options": {"include_usage": None, "continuous_usage_stats": True}},
    {"chat_template_kwargs": {}, "structured_outputs": None},
]  # fmt: skip


def test_the_page_names_what_refusals_name_in_the_place_of_an_option():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", CLIENTS.read_text(), re.M)

    for name, instead in INSTEAD.items():
        assert any(f"`{name}`" in left and f"`{instead}`" in place for left, place in rows), name


async def test_what_says_the_same_as_nothing_changes_nothing():
    generator = able()
    async with http_before(generator) as caller:
        for body in ({}, *NOTHING):
            status, found = await caller.post(model="dates", prompt="a", **body)
            assert (status, body, found["choices"][0]["text"]) == (200, body, "a ")

    assert len({repr(one.params) for one in generator.requests}) == 1


FORMATS = [
    ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
    ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type": "null"}'),
    ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
    ({"guided_choice": ["a"]}, "choice", "a"),
    ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
    ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, "json_schema",
     '{"type": "null"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True,
     "schema": {"type": "null"}}}}, "json_schema", '{"type": "null"}'),
    ({"response_format": {"type": "text"}}, "", ""),
]  # fmt: skip


async def test_what_an_answer_must_be_may_be_said_as_others_say_it():
    generator = able()
    async with http_before(generator) as caller:
        for body, kind, value in FORMATS:
            assert (await caller.post(model="dates", prompt="a", **body))[0] == 200
            found = generator.requests[-1].params.constraint
            assert found == (Constraint(kind, (value,)) if kind else None), body


@pytest.mark.parametrize(
    ("defaults", "strategy"),
    [
        ({}, "sampling"),
        ({"strategy": "greedy"}, "sampling"),
        ({"strategy": "beam", "beam": 3}, "beam"),
    ],
)
async def test_several_outputs_are_sampled_unless_the_model_has_a_search(
    defaults: dict[str, object], strategy: str
):
    generator = able(package=generation_package(**defaults))
    async with http_before(generator) as caller:
        status, _ = await caller.post(model="dates", prompt="a", n=3)
        refused, _ = await caller.post(model="dates", prompt="a", n=3, temperature=0)

    assert (status, refused) == (200, 400)
    params = generator.requests[0].params
    assert (params.strategy, params.temperature, params.num_outputs) == (strategy, 1.0, 3)


async def test_an_answer_may_keep_its_special_tokens_and_its_stop():
    generator = able()
    async with http_before(generator) as caller:
        said = {"skip_special_tokens": False, "include_stop_str_in_output": True}
        status, _ = await caller.post(model="dates", prompt="a", top_k=-1, **said)

    params = generator.requests[0].params
    assert (status, params.skip_special_tokens, params.include_stop) == (200, False, True)
    assert (params.strategy, params.top_k) == ("sampling", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, 401),
        (grpc.StatusCode.PERMISSION_DENIED, 403),
        (grpc.StatusCode.NOT_FOUND, 404),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.UNIMPLEMENTED, 400),
        (grpc.StatusCode.ABORTED, 409),
        (grpc.StatusCode.UNKNOWN, 500),
    ],
)
async def test_what_a_call_ends_with_has_a_status(code: grpc.StatusCode, status: int, stream: bool):
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    with scripted_server() as script:
        for rpc in ("Generate", "GenerateStream"):
            script.answers[rpc] = lambda request, context: fail(context, code, "no", retry)
        async with http_server(script.address) as caller:
            url, body = f"{caller.url}/v1/completions", {"model": "m", "prompt": "a"}
            async with caller.session.post(url, json=body | {"stream": stream}) as found:
                answer = await found.json()

    assert found.status == status
    assert answer["error"]["message"] == "no"
    assert found.headers["Retry-After"] == "3"
    assert ("x-should-retry" in found.headers) == (code is grpc.StatusCode.ABORTED)


_POSTED = [
    ("completions", {"prompt": "a"}),
    ("completions", {"prompt": "a", "stream": True}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), _POSTED)
async def test_the_log_knows_a_request_by_what_its_client_calls_it(path: str, body: dict[str, Any]):
    def refuse(request: object, context: grpc.ServicerContext) -> object:
        fail(context, grpc.StatusCode.INTERNAL, "no")

    with scripted_server() as script:
        script.answers |= dict.fromkeys(("Generate", "GenerateStream", "Embed"), refuse)
        async with http_server(script.address) as caller:
            url, body = f"{caller.url}/v1/{path}", {"model": "m", **body}
            sent = [{"x-request-id": "mine-7"}, {}, {"x-request-id": "x" * 129}]
            told = []
            for headers in sent:
                async with caller.session.post(url, json=body, headers=headers) as found:
                    assert found.status == 500
                    told.append(found.headers["x-request-id"])
            async with caller.session.post(url, json={}, headers=sent[0]) as found:
                assert (found.status, found.headers["x-request-id"]) == (400, "mine-7")
            named = body | {"request_id": "mine-8"}
            for headers, name in (({}, "mine-8"), (sent[0], "mine-7")):
                async with caller.session.post(url, json=named, headers=headers) as found:
                    told.append(found.headers["x-request-id"])
                    assert told[-1] == name

    asked = [getattr(one, "request", one).request_id for one in script.requests]
    assert asked == told
    assert told[0] == "mine-7"
    assert len(set(told)) == 4


async def test_a_fault_of_the_server_itself_is_found_by_the_id_of_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(TextForm, "choice", None)
    async with http_before(FakeGenerator()) as caller:
        status, _ = await caller.post(headers={"x-request-id": "mine"}, model="dates", prompt="a")

    assert status == 500
    assert "/v1/completions fails, request_id=mine; its traceback follows" in caplog.text
    assert "TypeError" in caplog.text


async def test_an_error_within_a_stream_is_its_last_event():
    gone = grpc.StatusCode.UNAVAILABLE, "gone"
    with scripted_server() as script:
        script.answers["GenerateStream"], read = breaking_stream("a", *gone)
        async with http_server(script.address) as caller:
            body = {"model": "m", "prompt": "a", "stream": True}
            async with caller.session.post(f"{caller.url}/v1/completions", json=body) as found:
                first = await found.content.readuntil(b"\n\n")
                read.set()
                last = (await found.text()).strip()

    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "a"
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gone"


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_a_stream_with_a_gap_or_without_its_end_is_no_answer(lost: int):
    messages = list(stream_messages(["a", "b"]))
    with scripted_server() as script:
        script.answers["GenerateStream"] = lambda request, context: iter(
            messages[:lost] + messages[lost + 1 :]
        )
        async with http_server(script.address) as caller:
            events = await caller.stream(model="m", prompt="a")

    assert events[-1]["error"]["code"] == "broken_stream"


@pytest.mark.parametrize("prompt", ["HOLD", "a HOLD"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_frees_the_engine(stream: bool, prompt: str):
    generator = FakeGenerator()
    async with http_before(generator) as caller:
        call = asyncio.create_task(caller.post(model="dates", prompt=prompt, stream=stream))
        await asyncio.wait_for(generator.seen.wait(), 60)
        call.cancel()
        await asyncio.wait_for(generator.done.wait(), 60)

    assert len(generator.aborted) == 1


async def test_who_calls_is_told_to_the_server_behind():
    def authorized(script: ScriptedServer) -> Sequence[object]:
        return [dict(one).get("authorization") for one in script.metadata]

    with scripted_server() as script:
        async with http_server(script.address, token="own") as caller:
            for headers in ({}, {"Authorization": "Bearer theirs"}):
                async with caller.session.get(f"{caller.url}/v1/models", headers=headers) as found:
                    assert found.status == 200
            for wrong in ("Basic eA==", "Bearer ", "Bearer", "Bearer a b", "tw_x", ""):  # are none
                headers = {"Authorization": wrong, "api-key": "x"}
                async with caller.session.get(f"{caller.url}/v1/models", headers=headers) as found:
                    assert found.status == 200

    assert authorized(script) == ["Bearer own", "Bearer theirs", *["Bearer own"] * 6]


async def test_a_token_is_asked_for_where_the_server_behind_asks_for_one(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_a", tenant="a"))
    gateway = Gateway(GatewayConfig(auth=Auth(tokens=tokens)))
    address = f"127.0.0.1:{await gateway.start()}"
    async with http_server(address) as caller:
        for shown in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic eA=="}):
            async with caller.session.get(f"{caller.url}/v1/models", headers=shown) as found:
                error = (await found.json())["error"]
                assert (found.status, found.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert error["code"] == "invalid_api_key"
            assert error["message"].startswith(
                "this server asks for a token, and the call has none; send the header (in gRPC the "
            )
    await gateway.close()


async def test_models_are_listed_and_found_by_their_names():
    async with http_before(FakeGenerator()) as caller:
        async with caller.session.get(f"{caller.url}/v1/models") as found:
            listed = await found.json()
        async with caller.session.get(f"{caller.url}/v1/models/dates") as found:
            one = await found.json()
        async with caller.session.get(f"{caller.url}/v1/models/x") as found:
            assert (found.status, (await found.json())["error"]["code"]) == (404, "model_not_found")
        async with caller.session.get(f"{caller.url}/v1/nothing") as found:
            assert (found.status, "error" in await found.json()) == (404, True)
        async with caller.session.get(f"{caller.url}/health") as found:
            assert (found.status, await found.json()) == (200, {"status": "SERVING"})
        status, answer = await caller.post(model="x", prompt="a")

    assert (listed["object"], listed["data"]) == ("list", [one])
    assert (one["id"], one["object"]) == ("dates", "model")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_models_are_those_that_the_token_of_a_request_may_use(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_some", tenant="a", models=["tags"]) + entry("tw_all", tenant="b"))
    gateway = Gateway(GatewayConfig(auth=Auth(tokens=tokens)))
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, worker):
        address = f"127.0.0.1:{await gateway.start()}"
        await gateway.pool.sync([worker])
        await until(lambda: gateway.pool.num_serving == 1)
        async with http_server(address) as caller:

            async def get(path: str, token: str) -> tuple[int, dict[str, Any]]:
                headers = {"Authorization": f"Bearer {token}"}
                async with caller.session.get(caller.url + path, headers=headers) as found:
                    return found.status, await found.json()

            listed = [(await get("/v1/models", name))[1]["data"] for name in ("tw_some", "tw_all")]
            status, hidden = await get("/v1/models/dates", "tw_some")
            _, shown = await get("/page/models", "tw_some")
        await gateway.close()

    assert [[model["id"] for model in models] for models in listed] == [["tags"], ["dates", "tags"]]
    assert (status, hidden["error"]["code"]) == (404, "model_not_found")
    assert [model["model"] for model in shown["models"]] == ["tags"]


async def test_answers_are_counted_by_route_and_status():
    config = HttpConfig(port=0, max_requests=1, grace=0)
    generator = FakeGenerator()
    async with http_before(generator, config=config) as caller:
        for prompt in ("a", "b", ""):
            await caller.post(model="dates", prompt=prompt)
        call = asyncio.create_task(caller.post(model="dates", prompt="HOLD"))
        await asyncio.wait_for(generator.seen.wait(), 60)
        await caller.post("embeddings", model="dates", input="a")
        generator.release.set()
        await call
        for path in ("/v1/models/x", "/v1/models/y", "/made/up", "/v1/nothing"):
            async with caller.session.get(caller.url + path) as found:
                assert found.status == 404
        async with caller.session.get(f"{caller.url}/metrics") as found:
            families = text_string_to_metric_families(await found.text())

    (family,) = families
    assert {(*sample.labels.values(), sample.value) for sample in family.samples} == {
        ("/v1/completions", "200", 3),
        ("/v1/completions", "400", 1),
        ("/v1/embeddings", "503", 1),
        ("/v1/models/{model:path}", "404", 2),
        ("other", "404", 2),
    }


async def test_counts_are_for_who_may_see_the_load():
    config = HttpConfig(port=0, admin_token="tw_a", grace=0)
    async with http_before(FakeGenerator(), config=config) as caller:
        for headers, status in (({}, 401), ({"Authorization": "Bearer tw_a"}, 200)):
            async with caller.session.get(f"{caller.url}/metrics", headers=headers) as found:
                assert found.status == status


async def test_models_that_generate_are_listed_first():
    engines = FakePredictor(prediction_package("a")), FakeGenerator(), FakePredictor()
    async with http_before(*engines) as caller:
        async with caller.session.get(f"{caller.url}/v1/models") as found:
            assert [one["id"] for one in (await found.json())["data"]] == ["dates", "a", "tags"]


async def test_health_is_that_of_the_server_behind():
    async with http_server("127.0.0.1:1") as caller:
        async with caller.session.get(f"{caller.url}/health") as found:
            assert (found.status, await found.json()) == (503, {"status": "NOT_SERVING"})


async def test_bodies_and_open_requests_are_bounded():
    generator = FakeGenerator()
    config = HttpConfig(port=0, max_body_bytes=100, max_requests=1, grace=0)
    async with http_before(generator, config=config) as caller:
        status, answer = await caller.post(model="dates", prompt="a" * 100)
        assert (status, "more than 100 bytes" in answer["error"]["message"]) == (413, True)

        call = asyncio.create_task(caller.post(model="dates", prompt="HOLD"))
        await asyncio.wait_for(generator.seen.wait(), 60)
        assert (await caller.post(model="dates", prompt="a"))[0] == 503
        async with caller.session.get(f"{caller.url}/health") as found:
            assert found.status == 200
        generator.release.set()
        assert (await call)[0] == 200


async def test_a_body_that_does_not_come_is_not_waited_for():
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    config = HttpConfig(port=0, body_seconds=0.2, grace=0)
    async with http_before(FakeGenerator(), config=config) as caller:
        async with caller.session.post(f"{caller.url}/v1/completions", data=slow()) as found:
            assert found.status == 408


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("eos", "stop"), ("stop", "stop"), ("length", "length"), ("context_full", "length")],
)
def test_an_end_has_the_name_that_clients_know(ours: str, theirs: str):
    assert finish_reason(ours) == theirs


def test_every_token_has_its_place_in_the_text():
    tokens = (TokenLogprob(1, b"ab", -1.0, 1), TokenLogprob(2, "ü".encode(), -math.inf, 2))
    positions = tuple(PositionLogprobs(token, (tokens[0],)) for token in tokens)

    (piece,) = _TEXTS.piece(0, "abü", positions, offset=5)

    assert piece["logprobs"] == {
        "tokens": ["ab", "ü"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"ab": -1.0}, {"ab": -1.0, "ü": -9999.0}],
        "text_offset": [5, 7],
    }


def test_tokens_without_a_text_of_their_own_are_named_by_their_ids():
    pieces = {300: b"", 301: b"", 5: b"a", 6: b"a", 7: b"b", 8: b"\xd6"}
    top = tuple(TokenLogprob(id_, piece, -1.0, 1) for id_, piece in pieces.items())

    (piece,) = _TEXTS.piece(0, "", (PositionLogprobs(top[0], top),), offset=0)

    found = piece["logprobs"]
    assert found["tokens"] == ["token_id:300"]
    names = "token_id:300 token_id:301 token_id:5 token_id:6 b bytes:\\xd6"
    assert list(found["top_logprobs"][0]) == names.split()


async def test_log_probabilities_of_a_source_are_not_echoed():
    body = {"model": "dates", "prompt": "abc", "echo": True}  # with an encoder
    async with http_before(able()) as caller:
        _, plain = await caller.post(**body)
        refused = [await caller.post(**body, logprobs=1, stream=stream) for stream in (False, True)]

    assert plain["choices"][0]["text"] == "abcabc "
    for status, found in refused:
        assert (status, found["error"]["param"]) == (400, "echo")
        assert "models that continue their prompt" in found["error"]["message"]


async def test_what_a_conversation_was_made_into_is_told():
    generator = able("chat")
    said = {"model": "dates", "messages": [{"role": "user", "content": "ab c"}]}

    async with http_before(generator) as caller:
        _, found = await caller.post(
            "chat/completions", **said, prompt_logprobs=1, return_token_ids=True
        )
        *chunks, _ = await caller.stream("chat/completions", **said, return_token_ids=True)
        *pieces, _ = await caller.stream(
            model="dates", prompt=["ab c", "d"], return_token_ids=True, echo=False
        )

    assert found["prompt_token_ids"] == [4, 9]
    assert found["choices"][0]["token_ids"] == [2, 1]
    first, second = found["prompt_logprobs"]
    assert (first, second["1"]) == (None, {"logprob": -2.0, "rank": 2, "decoded_token": "<1>"})
    assert second["90"]["logprob"] == -1.0
    assert [one.get("prompt_token_ids") for one in chunks] == [[4, 9], None, None, None]
    assert [one["choices"][0]["token_ids"] for one in chunks] == [[], [2], [1], []]
    choices = [one["choices"][0] for one in pieces]
    for place, ids in enumerate(([2, 1], [1])):
        found = [one for one in choices if one["index"] == place]
        assert [one.get("prompt_token_ids") for one in found][:2] == [[4, 9], None]
        assert [one for each in found for one in each["token_ids"]] == ids


@pytest.mark.parametrize(
    ("said", "ending"),
    [({}, (True, False)), ({"add_generation_prompt": False}, (False, False)),
     ({"continue_final_message": True}, (False, True)),
     ({"continue_final_message": True, "add_generation_prompt": False}, (False, True))],
)  # fmt: skip
async def test_a_conversation_ends_as_it_is_asked_for(
    said: dict[str, Any], ending: tuple[bool, bool]
):
    generator = able("chat")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    async with http_before(generator) as caller:
        status, _ = await caller.post("chat/completions", model="dates", messages=messages, **said)

    assert status == 200
    chat = generator.requests[0].prompt
    assert (chat.add_generation_prompt, chat.continue_final_message) == ending


async def test_a_conversation_is_answered_whole_and_streamed():
    generator = able("chat")
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    said = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]}
    said |= {"model": "dates", "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 9}

    async with http_before(generator) as caller:
        status, found = await caller.post("chat/completions", **said)
        first, *pieces, end, done = await caller.stream("chat/completions", **said)

    assert (status, found["object"]) == (200, "chat.completion")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab c ", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -1.0
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"]["content"] for one in pieces) == "ab c "
    assert (end["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert generator.requests[0].params.max_new_tokens == 9


MESSAGES = [
    {"refusal": None, "annotations": [], "audio": None, "tool_calls": []},
    {
        "name": "bob",
        "function_call": None,
        "tool_call_id": None,
        "reasoning_content": "",
        "refusal": "",
    },
    {"reasoning_content": "because", "reasoning": "why"},
    {"parsed": {"a": 1}, "prefix": False},
    {"content": [{"type": "text", "text": "ab", "cache_control": {}, "annotations": []}]},
]  # fmt: skip


async def test_a_message_may_come_back_as_servers_write_it():
    generator = FakeGenerator()
    generator.capabilities += ("chat",)

    async with http_before(generator) as caller:
        for message in MESSAGES:
            said = [{"role": "assistant", "content": "ab", **message}]
            status, found = await caller.post("chat/completions", model="dates", messages=said)
            assert (status, found["choices"][0]["message"]["content"]) == (200, "ab ")
            (one,) = generator.requests[-1].prompt.messages
            assert (one.role, one.content) in (("assistant", "ab"), ("assistant", ("ab",)))


WRONG_CHATS = [
    ({"tools": [{"type": "function"}]}, 'tools[0]: give {"type": "function", "function": {"name": '
     '..., "parameters": ...}}', "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0]: custom is no type that is known here; give "
     "functions", "tools"),
    ({"tool_choice": "required"}, "tool_choice is for tools, and there are none", "tool_choice"),
    ({"tool_choice": "any"}, 'tool_choice: give "none", "auto", "required" or {"type": '
     '"function", "function": {"name": ...}}', "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs is for logprobs=true", "top_logprobs"),
    ({"top_logprobs": 99, "logprobs": True}, "top_logprobs: 99 is outside 0 to 20 "
     "alternatives; 0 gives the chosen token's", "top_logprobs"),
    ({"messages": []}, "messages: List should have at least 1 item after validation, not 0",
     "messages"),
    ({"messages": "a"}, "messages: Input should be a valid array", "messages"),
    ({"messages": [5]}, "messages[0]: Input should be an object", "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing; a message has role "
     "and content", "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is missing; a "
     "message has role and content", "messages"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
     "messages[0].tool_calls[0] is no call of a function; one has id and function", "messages"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]},
     "messages[0].tool_call_id=5: give a text", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0] is of type 'image_url'; only texts can be sent", "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content=5: give a text, or a "
     "list of parts", "messages"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens, max_tokens: give "
     "one of them only", "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens: 0 is below 1; leave it out for the "
     "model's limit", "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema and the type "
     "json_schema go together", "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type: Input should be 'text', "
     "'json_object' or 'json_schema'", "response_format"),
    ({"enable_thinkin": False}, "enable_thinkin is not an option of this server; the nearest is "
     "enable_thinking", "enable_thinkin"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message: it "
     "goes with add_generation_prompt=false; leave one of the two out", "continue_final_message"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs: Input should be an object",
     "chat_template_kwargs"),
]  # fmt: skip


async def test_what_a_conversation_cannot_have_is_named():
    generator = able("chat")
    async with http_before(generator) as caller:
        for body, said, param in WRONG_CHATS:
            for stream in (False, True):
                given = {"model": "dates", "messages": [{"role": "user", "content": "a"}], **body}
                status, found = await caller.post("chat/completions", stream=stream, **given)
                assert (status, found["error"]["message"]) == (400, said)
                assert found["error"]["param"] == param


async def test_a_model_without_a_chat_template_says_so():
    async with http_before(FakeGenerator()) as caller:
        said = [{"role": "user", "content": "a"}]
        status, found = await caller.post("chat/completions", model="dates", messages=said)

    assert (status, found["error"]["message"].partition(":")[0]) == (400, "messages")


async def test_special_tokens_are_added_to_a_text_if_wanted_and_not_to_a_conversation():
    generator = able("chat")
    said = {"model": "dates", "messages": [{"role": "user", "content": "a"}]}
    async with http_before(generator) as caller:
        for add, text, chat in ((True, 200, 400), (False, 200, 200)):
            status, _ = await caller.post(model="dates", prompt="a", add_special_tokens=add)
            assert status == text
            status, _ = await caller.post("chat/completions", **said, add_special_tokens=add)
            assert status == chat


async def test_the_most_tokens_of_an_answer_have_two_names():
    generator = able("chat")
    said = {"model": "dates", "messages": [{"role": "user", "content": "a"}]}
    async with http_before(generator) as caller:
        for name in ("max_tokens", "max_completion_tokens"):
            assert (await caller.post("chat/completions", **said, **{name: 7}))[0] == 200

    assert [one.params.max_new_tokens for one in generator.requests] == [7, 7]


async def test_variables_of_the_chat_template_are_handed_on():
    generator = able("chat")
    said = {"model": "dates", "messages": [{"role": "user", "content": "a"}]}
    said |= {"enable_thinking": False, "reasoning_effort": "none"}
    async with http_before(generator) as caller:
        status, _ = await caller.post(
            "chat/completions", **said, chat_template_kwargs={"a": [1, 2.5], "enable_thinking": 1}
        )

    assert status == 200
    assert generator.requests[0].prompt.variables == {
        "a": [1, 2.5], "enable_thinking": 1, "reasoning_effort": "none"
    }  # fmt: skip


async def test_embeddings_are_numbers_or_their_bytes():
    async with http_before(FakePredictor()) as caller:
        asked = {"model": "tags", "input": ["a", "b"]}
        _, plain = await caller.post("embeddings", **asked)
        _, raw = await caller.post("embeddings", **asked, normalize=False)
        _, packed = await caller.post("embeddings", **asked, encoding_format="base64")
        status, _ = await caller.post("embeddings", **asked, dimensions=1)
        fitting, _ = await caller.post("embeddings", **asked, dimensions=2, stream=False)

    assert [one["embedding"] for one in raw["data"]] == [[3.0, 4.0]] * 2
    assert [one["index"] for one in raw["data"]] == [0, 1]
    assert raw["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert plain["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    vector = struct.unpack("<2f", base64.b64decode(packed["data"][0]["embedding"]))
    assert vector == pytest.approx([0.6, 0.8])
    assert (status, fitting) == (400, 200)


async def test_texts_to_embed_may_be_cut():
    predictor = FakePredictor()
    sides = (True, "right", "left", False, None)
    async with http_before(predictor) as caller:
        for side in sides:
            await caller.post("embeddings", model="tags", input="a", truncate=side)
        status, found = await caller.post("embeddings", model="tags", input="a", truncate="up")

    sent = [item.truncation for item in predictor.items]
    assert sent == ["right", "right", "left", None, None]
    assert (status, found["error"]["param"]) == (400, "truncate")


async def test_ids_of_another_tokenizer_are_told_from_other_mistakes():
    async with http_before(FakePredictor()) as caller:
        _, ids = await caller.post("embeddings", model="tags", input=[[5, 943], [7]])
        _, name = await caller.post("embeddings", model="x", input=[[5]])
        _, far = await caller.post("embeddings", model="tags", input=[[5], [2**33]])

    assert ids["error"]["message"].startswith("input[0][1]: 943 is outside the vocabulary")
    assert "check_embedding_ctx_length=False" in ids["error"]["message"]
    assert "LangChain" not in name["error"]["message"]
    assert far["error"]["message"] == "input[1]: Value out of range: 8589934592"
    assert far["error"]["param"] == "input"


async def test_a_request_may_have_as_many_inputs_as_openai_takes():
    texts = ["a b", "a"] * 1024
    async with http_before(FakeGenerator(), FakePredictor()) as caller:
        _, vectors = await caller.post("embeddings", model="tags", input=texts)
        _, answers = await caller.post(model="dates", prompt=texts[:130], n=1)
        status, refused = await caller.post("embeddings", model="tags", input=[*texts, "a"])

    assert [one["index"] for one in vectors["data"]] == list(range(2048))
    assert vectors["usage"]["prompt_tokens"] == 5 * 2048
    assert [one["text"] for one in answers["choices"]] == ["a b ", "a "] * 65
    assert answers["usage"]["completion_tokens"] == 3 * 65
    assert (status, refused["error"]["param"]) == (400, "input")


async def test_the_package_openai_is_a_client():
    import openai

    generator = able("chat")
    async with http_before(generator, FakePredictor()) as caller:
        url = f"{caller.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            assert [one.id async for one in await client.models.list()] == ["dates", "tags"]
            whole = await client.completions.create(model="dates", prompt="ab c", logprobs=1)
            assert (whole.choices[0].text, whole.usage.total_tokens) == ("ab c ", 4)
            stream = await client.completions.create(model="dates", prompt="ab c", stream=True)
            assert "".join([one.choices[0].text async for one in stream]) == "ab c "
            said = [{"role": "user", "content": "hello you"}]
            chat = await client.chat.completions.create(model="dates", messages=said)
            assert chat.choices[0].message.content == "hello you "
            spoken = await client.chat.completions.create(model="dates", messages=said, stream=True)
            pieces = [one.choices[0].delta.content or "" async for one in spoken]
            assert "".join(pieces) == "hello you "
            vectors = await client.embeddings.create(model="tags", input="a")  # by base64
            assert vectors.data[0].embedding == pytest.approx([0.6, 0.8])
            with pytest.raises(openai.NotFoundError, match="no model"):
                await client.completions.create(model="x", prompt="a")
            with pytest.raises(openai.BadRequestError, match="top_p"):
                await client.completions.create(model="dates", prompt="a", top_p=7)


async def test_the_client_of_the_load_test_is_answered():
    async with http_before(FakeGenerator()) as caller:
        target = OpenAiHttp(f"{caller.url}/v1", "dates", timeout=60)
        try:
            assert (await target.find()).method == "generate"
            reply = await target.send(Ask("ab c", options={"max_new_tokens": 9}), keep=True)
        finally:
            await target.close()

    assert (reply.input_tokens, reply.output_tokens, reply.finish_reason) == (2, 2, "stop")
    assert reply.answer["text"] == "ab c "


@pytest.mark.parametrize("form", [_TEXTS, _CHATS])
def test_a_token_that_cannot_come_has_a_number_that_json_has(form: Form):
    impossible = TokenLogprob(1, b"\xe2", -math.inf, 9)
    positions = (PositionLogprobs(impossible, (impossible,)),)

    said = json.dumps([*form.piece(0, "", positions, 0)], allow_nan=False)

    assert "-9999.0" in said
    assert r"bytes:\\xe2" in said


async def test_a_reason_that_is_newer_than_this_server_is_told():
    messages = list(stream_messages(["a"]))
    messages[1].finished.finish_reason = 99
    with scripted_server() as script:
        script.answers["GenerateStream"] = lambda request, context: iter(messages)
        async with http_server(script.address) as caller:
            events = await caller.stream(model="m", prompt="a")

    assert events[-2]["choices"][0]["finish_reason"] == "99"
    assert events[-1] == "[DONE]"


async def test_the_trace_of_a_request_goes_on():
    with scripted_server() as script:
        async with http_server(script.address) as caller:
            for trace in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "\u00e9"):
                headers = {"traceparent": trace}
                async with caller.session.get(f"{caller.url}/v1/models", headers=headers) as found:
                    assert found.status == 200

    traces = [dict(one).get("traceparent") for one in script.metadata]
    assert traces == ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None]


async def test_the_command_serves_until_it_is_told_to_end():
    async with running_worker(FakeGenerator()) as (_, address):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from server.cli import main; main()"),
            *("http", "--server", address, "--port", "0"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.readline(), 240)).decode()
        url = said.partition(" at ")[2].partition("/v1")[0]
        async with aiohttp.ClientSession() as session:
            status, answer = await Caller(session, url).post(model="dates", prompt="a b")
        process.terminate()
        _, rest = await asyncio.wait_for(process.communicate(), 240)

    assert (status, answer["choices"][0]["text"]) == (200, "a b ")
    assert (process.returncode, rest) == (0, b"")
