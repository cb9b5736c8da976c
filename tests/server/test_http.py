"""The HTTP server answers OpenAI's protocol, before a real worker of fakes or a scripted one."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from tokenweir import PositionLogprobs, TokenLogprob

from loadtest.target.openai_http import OpenAiHttp
from loadtest.work.ask import Ask
from server.cli.app import run
from server.config import GatewayConfig
from server.front_config import HttpConfig
from server.gateway.gateway import Gateway
from server.http.answers import Form, TextForm, finish_reason
from server.http.chat import ChatForm
from server.identity.config import DoorsConfig
from tests.server.calls import until
from tests.server.fakes import OPTIONS, FakeGenerator, FakePredictor, running_worker
from tests.server.http_calls import Caller, http_server
from tests.server.scripted_server import ScriptedServer, fail, scripted_server, stream_messages
from tests.server.test_door import entry


@asynccontextmanager
async def http_before(*engines: Any, config: HttpConfig | None = None) -> AsyncIterator[Caller]:
    async with running_worker(*engines) as (_, address):
        async with http_server(address, config) as caller:
            yield caller


def able() -> FakeGenerator:
    generator = FakeGenerator()
    generator.capabilities += OPTIONS
    return generator


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


async def test_a_stream_has_the_pieces_the_end_and_what_it_took():
    async with http_before(able()) as caller:
        events = await caller.stream(
            model="dates", prompt="ab c", stream_options={"include_usage": True}, logprobs=0
        )

    assert events[-1] == "[DONE]"
    *pieces, end, usage = events[:-1]
    assert "".join(one["choices"][0]["text"] for one in pieces) == "ab c "
    assert [one["choices"][0]["finish_reason"] for one in (*pieces, end)][-1] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
    assert len({one["id"] for one in events[:-1]}) == 1


async def test_a_stream_of_beams_has_the_best_one():
    async with http_before(able()) as caller:
        events = await caller.stream(model="dates", prompt="ab c", beam=4)

    assert [one["choices"][0]["text"] for one in events[:-1]] == ["ab c ", ""]


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix is not an option", None),
        ({"prompt": "a", "best": 2}, "best is not an option", None),
        ({"prompt": "a", "tenant": "me"}, "tenant is not an option", None),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens: ", "max_tokens"),
        ({"prompt": []}, "prompt", "prompt"),
        ({}, "prompt: Field required", "prompt"),
        ({"prompt": "a", "top_p": 7}, "top_p", "top_p"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "'x'", None),
        ({"prompt": ["a", "b"], "stream": True}, "of one prompt", "prompt"),
        ({"prompt": "a", "seed": -1}, "seed=-1", None),
        ({"prompt": "a", "seed": -1, "stream": True}, "seed=-1", None),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, object], said: str, param: str | None):
    async with http_before(FakeGenerator()) as caller:
        status, found = await caller.post(model="dates", **body)

    assert status == 400
    assert said in found["error"]["message"]
    assert (found["error"]["type"], found["error"]["param"]) == ("invalid_request_error", param)


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
    assert answer["error"]["message"] == f"{code.name}: no"
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

    asked = [getattr(one, "request", one).request_id for one in script.requests]
    assert asked == told
    assert told[0] == "mine-7"
    assert len(set(told)) == 3


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
    with scripted_server() as script:

        def answer(request: object, context: grpc.ServicerContext) -> object:
            yield next(iter(stream_messages(["a"])))
            fail(context, grpc.StatusCode.UNAVAILABLE, "gone")

        script.answers["GenerateStream"] = answer
        async with http_server(script.address) as caller:
            events = await caller.stream(model="m", prompt="a")

    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["message"] == "UNAVAILABLE: gone"


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_a_stream_with_a_gap_or_without_its_end_is_no_answer(lost: int):
    messages = list(stream_messages(["a", "b"]))
    with scripted_server() as script:
        script.answers["GenerateStream"] = lambda request, context: iter(
            messages[:lost] + messages[lost + 1 :]
        )
        async with http_server(script.address) as caller:
            events = await caller.stream(model="m", prompt="a")

    assert "DATA_LOSS/BROKEN_STREAM" in events[-1]["error"]["message"]


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
            for wrong in ("Basic eA==", "Bearer ", "Bearer a b"):
                headers = {"Authorization": wrong}
                async with caller.session.get(f"{caller.url}/v1/models", headers=headers) as found:
                    assert (found.status, found.headers["WWW-Authenticate"]) == (401, "Bearer")

    assert authorized(script) == ["Bearer own", "Bearer theirs"]


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
    gateway = Gateway(GatewayConfig(doors=DoorsConfig(tokens=tokens)))
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, worker):
        address = f"127.0.0.1:{await gateway.start()}"
        await gateway.sync([worker])
        await until(lambda: gateway.num_serving == 1)
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

    piece = TextForm().piece(0, "abü", positions, offset=5)

    assert piece["logprobs"] == {
        "tokens": ["ab", "ü"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"ab": -1.0}, {"ab": -1.0, "ü": -9999.0}],
        "text_offset": [5, 7],
    }


async def test_a_conversation_is_answered_whole_and_streamed():
    generator = FakeGenerator()
    generator.capabilities += (*OPTIONS, "chat")
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


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
            {"type": "null"},
        ),
    ],
)
async def test_the_format_of_an_answer_is_a_schema(response_format: object, schema: object):
    with scripted_server() as script:
        async with http_server(script.address) as caller:
            said = [{"role": "user", "content": "a"}]
            await caller.post(
                "chat/completions", model="m", messages=said, response_format=response_format
            )

    assert json.loads(script.requests[0].decoding.constraint.json_schema) == schema


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not an option"),
        ({"top_logprobs": 2}, "top_logprobs is for logprobs=true"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "name"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "give max_completion_tokens or max_tokens"),
        ({}, "chat"),  # the model has no template
    ],
)
async def test_what_a_conversation_cannot_have_is_named(body: dict[str, object], said: str):
    given = {"model": "dates", "messages": [{"role": "user", "content": "a"}], **body}
    async with http_before(FakeGenerator()) as caller:
        status, found = await caller.post("chat/completions", **given)

    assert (status, said in found["error"]["message"]) == (400, True)


async def test_embeddings_are_numbers_or_their_bytes():
    async with http_before(FakePredictor()) as caller:
        asked = {"model": "tags", "input": ["a", "b"]}
        _, plain = await caller.post("embeddings", **asked)
        _, raw = await caller.post("embeddings", **asked, normalize=False)
        _, packed = await caller.post("embeddings", **asked, encoding_format="base64")
        status, _ = await caller.post("embeddings", **asked, dimensions=1)

    assert [one["embedding"] for one in raw["data"]] == [[3.0, 4.0]] * 2
    assert [one["index"] for one in raw["data"]] == [0, 1]
    assert raw["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert plain["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    vector = struct.unpack("<2f", base64.b64decode(packed["data"][0]["embedding"]))
    assert vector == pytest.approx([0.6, 0.8])
    assert status == 400


async def test_the_package_openai_is_a_client():
    import openai

    generator = FakeGenerator()
    generator.capabilities += (*OPTIONS, "chat")
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


@pytest.mark.parametrize("form", [TextForm(), ChatForm()])
def test_a_token_that_cannot_come_has_a_number_that_json_has(form: Form):
    impossible = TokenLogprob(1, b"\xe2", -math.inf, 9)
    positions = (PositionLogprobs(impossible, (impossible,)),)

    said = json.dumps(form.piece(0, "", positions, 0), allow_nan=False)

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


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["http", "--port", str(port)]) == 3

    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


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
