"""Calls of other protocols are allowed, counted and logged as those of ours are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.config import EngineConfig
from engine.generation.async_engine import AsyncEngine
from engine.text.chat_format import ChatFormat
from server.config import GatewayConfig, WorkerConfig
from server.gateway.gateway import Gateway
from server.settings import Auth
from server.telemetry.logs import REQUESTS, fields_of
from server.worker.worker import Worker
from tests.conftest import ScriptedRunner
from tests.fakes.calls import until
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)
from tests.fakes.gateways import entry, running_gateway
from tests.fakes.http_calls import Caller, http_server
from tests.fakes.kserve_calls import Stub, request, stub_of, texts
from tests.server.adapters.conftest import TEMPLATE

THEIRS = {"authorization": "Bearer tw_theirs"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TOOLS = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
PROMPT = {"model": "m", "prompt": [97, 62], "max_tokens": 5}
ECHO = {"model": "m", "prompt": ["a>", "b>"], "max_tokens": 0, "echo": True, "logprobs": 1}
ANSWER = {"model": "m", "input": "a", "max_output_tokens": 5}
BYTES = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a>"]}
RANKS = {"query": "a", "documents": ["b", "c"]}

OVER_HTTP: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", PROMPT, "Generate"),
    ("/v1/completions", PROMPT | {"stream": True}, "GenerateStream"),
    ("/v1/completions", ECHO, "Generate"),
    ("/v1/chat/completions", TOOLS, "Generate"),
    ("/v1/chat/completions", TOOLS | {"stream": True}, "GenerateStream"),
    ("/v1/responses", ANSWER, "Generate"),
    ("/v1/responses", ANSWER | {"stream": True}, "GenerateStream"),
    ("/tokenize", {"prompt": "a"}, "Generate"),
    ("/detokenize", {"tokens": [97]}, "Generate"),
    ("/v1/embeddings", {"model": "vectors", "input": "a"}, "Embed"),
    ("/embeddings", {"model": "vectors", "input": "a"}, "Embed"),
    ("/embed", {"inputs": "a"}, "Embed"),
    ("/", {"inputs": "a"}, "Embed"),
    ("/predict", {"inputs": "a"}, "Classify"),
    ("/classify", {"input": ["a"]}, "Classify"),
    ("/rerank", RANKS, "Classify"),
    ("/v2/models/m/infer", {"inputs": [BYTES]}, "Generate"),
    ("/v2/models/ranker/versions/1/infer", {"inputs": [BYTES]}, "Classify"),
]
PATHS = [path for path, _, _ in OVER_HTTP]


@dataclass
class Served:
    """A gateway that asks for tokens, behind both adapters."""

    gateway: Gateway
    caller: Caller
    stub: Stub

    def counted(self, name: str, *labels: str) -> float:
        """Return what the gateway counts under a name and labels."""
        return sum(
            value
            for found, its, value in self.gateway.snapshot()
            if found == name and not isinstance(value, list) and set(labels) <= set(its)
        )


@pytest.fixture
async def served(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
    tmp_path: Path,
) -> AsyncIterator[Served]:
    engine, _ = scripted_engine(
        lambda source, tokens: ord("S"),
        config=EngineConfig(max_num_seqs=4),
        chat=ChatFormat(template=TEMPLATE, tool_format="hermes"),
        max_len=1500,
    )
    vectors = FakePredictor(prediction_package("vectors", task="embed"))
    ranker = FakePredictor(
        prediction_package("ranker", task="classify", takes="text", labels=["is"])
    )
    ranker.logits = (1.0,)
    (tokens := tmp_path / "tokens.toml").write_text(entry("tw_theirs", tenant="theirs"))
    config = GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens))
    worker = Worker({"m": engine, "vectors": vectors, "ranker": ranker}, WorkerConfig())
    address = await worker.start()
    try:
        async with (
            running_gateway(address, config=config) as (gateway, stubs),
            http_server(stubs.address) as caller,
            stub_of(stubs.address) as stub,
        ):
            yield Served(gateway, caller, stub)
    finally:
        await worker.drain(0)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the lines of requests, but for the lists of models that some calls begin with."""
    found = [dict(fields_of(record)) for record in caplog.records if record.name == REQUESTS]
    return [fields for fields in found if fields.get("method") != "ListModels"]


@pytest.mark.parametrize(("path", "body", "method"), OVER_HTTP, ids=PATHS)
async def test_a_call_over_http_has_a_tenant_a_line_and_a_count(
    path: str, body: dict[str, Any], method: str, served: Served, caplog: pytest.LogCaptureFixture
):
    url = f"{served.caller.url}{path}"
    with caplog.at_level(logging.INFO, REQUESTS):
        async with served.caller.session.post(url, json=body) as found:
            unknown = found.status
        before = served.counted("gateway_requests", method, "OK")
        async with served.caller.session.post(url, json=body, headers=THEIRS) as found:
            status, name = found.status, found.headers["x-request-id"]
            await found.read()
        await until(lambda: any(line["request_id"] == name for line in lines(caplog)))

    assert (unknown, status) == (401, 200)
    (line,) = (one for one in lines(caplog) if one["tenant"] == "theirs")
    assert (line["request_id"], line["method"], line["status"]) == (name, method, "OK")
    assert line["input_tokens"] > 0
    assert served.counted("gateway_requests", method, "OK") == before + 1


async def test_calls_of_kserve_have_a_tenant_a_line_and_a_count(
    served: Served, caplog: pytest.LogCaptureFixture
):
    sent = request("m", texts("a>"))
    metadata = tuple(THEIRS.items())
    with caplog.at_level(logging.INFO, REQUESTS):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.ModelInfer(sent)
        whole = await served.stub.ModelInfer(sent, metadata=metadata)
        pieces = [
            piece.infer_response
            async for piece in served.stub.ModelStreamInfer(iter([sent]), metadata=metadata)
        ]
        await until(lambda: len(lines(caplog)) == 2)

    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    told = [one.parameters["request_id"].string_param for one in (whole, pieces[-1])]
    methods = ["Generate", "GenerateStream"]
    found = [(one["request_id"], one["method"], one["tenant"]) for one in lines(caplog)]
    assert found == [(*each, "theirs") for each in zip(told, methods, strict=True)]
    assert [served.counted("gateway_requests", one, "OK") for one in methods] == [1, 1]


HOLD = {"model": "dates", "prompt": "ab HOLD", "stream": True}
CHAT_HOLD = {"model": "dates", "messages": [{"role": "user", "content": "ab HOLD"}], "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", HOLD),
        ("completions", HOLD | {"echo": True, "logprobs": 1}),
        ("chat/completions", CHAT_HOLD),
        ("chat/completions", CHAT_HOLD | {"stream_options": {"continuous_usage_stats": True}}),
        ("responses", {"model": "dates", "input": "ab HOLD", "stream": True}),
    ],
)
async def test_a_client_that_leaves_a_stream_ends_its_request(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    generator = FakeGenerator()
    generator.capabilities += (*OPTIONS, "chat")
    async with (
        running_worker(generator) as (_, worker),
        running_gateway(worker) as (_, stubs),
        http_server(stubs.address) as caller,
    ):
        with caplog.at_level(logging.INFO, REQUESTS):
            url, headers = f"{caller.url}/v1/{path}", {"x-request-id": "mine"}
            call = asyncio.create_task(caller.session.post(url, json=body, headers=headers))
            await asyncio.wait_for(generator.seen.wait(), 60)
            if call.done():
                (await call).close()
            call.cancel()
            await until(lambda: bool(lines(caplog)))

    assert len(generator.aborted) == 1
    assert [(one["request_id"], one["status"]) for one in lines(caplog)] == [("mine", "CANCELLED")]
