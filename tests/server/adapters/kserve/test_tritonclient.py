"""The package tritonclient calls models of every kind, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.adapters.config import HttpConfig, KserveConfig
from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.settings import Auth
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)
from tests.fakes.gateways import entry
from tests.fakes.http_calls import http_server
from tests.fakes.kserve_calls import kserve_server

_MOST = 4000  # bytes of a request


@asynccontextmanager
async def served(kind: str, tokens: Path) -> AsyncIterator[str]:
    """Serve a generator, a labeller and a classifier of images behind a gateway with tokens."""
    tokens.write_text(entry("tw_theirs", tenant="theirs"))
    config = GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens))
    generator = FakeGenerator()
    generator.capabilities += OPTIONS
    eyes = FakePredictor(prediction_package("eyes", task="classify"))
    async with running_worker(generator, FakePredictor(), eyes) as (_, worker):
        gateway = Gateway(config)
        address = f"127.0.0.1:{await gateway.start()}"
        await gateway.pool.sync([worker])
        try:
            if kind == "http":
                bounds = HttpConfig(port=0, grace=1, max_body_bytes=_MOST)
                async with http_server(address, bounds, token="tw_theirs") as caller:
                    yield caller.url.removeprefix("http://")
            else:
                limits = KserveConfig(port=0, grace=1, max_request_bytes=_MOST)
                async with kserve_server(address, limits, token="tw_theirs") as where:
                    yield where
        finally:
            await gateway.close()


async def said(*arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.triton_calls", *arguments),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await asyncio.wait_for(process.communicate(), 240)
    return json.loads(told)


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_models_of_every_kind_are_called(kind: str, tmp_path: Path):
    async with served(kind, tmp_path / "tokens.toml") as address:
        found = await said("calls", kind, address)

    failures = found.pop("failures")
    assert found == {
        "live": True,
        "ready": [True, True],
        "unknown": False,
        "server": "tokenweir",
        "inputs": ["text", "text_pair", "input_ids"],
        "decoupled": True,
        "index": ["dates", "eyes", "tags"],
        "id": "7",
        "text": ["ab c ", "d "],
        "num_tokens": [[2], [1]],
        "text_output": ["ab c "],
        "of ids": ["4 5 "],
        "labels": ["DET"] * 3,
        "vectors": [[3.0, 4.0], [3.0, 4.0]],
        "class": ["DET"],
        "models with statistics": 3,
        "has been asked": True,
        "outcomes": [3, 3],
    }
    names = ["NOT_FOUND", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "UNAUTHENTICATED"]
    statuses = {
        "grpc": [f"StatusCode.{name}" for name in (*names, "RESOURCE_EXHAUSTED")],
        "http": ["404", "400", "400", "401", "413"],
    }
    assert [status for status, _ in failures] == statuses[kind]
    for (_, message), part in zip(
        failures,
        ("no model 'x'", "best: no parameter of a generation", "seed=-1", "token", ""),
        strict=True,
    ):
        assert part in message


async def test_a_generation_comes_in_pieces_and_other_answers_as_one(tmp_path: Path):
    async with served("grpc", tmp_path / "tokens.toml") as address:
        found = await said("stream", "grpc", address)

    rest = ["finish_reason", "num_tokens", "sum_logprob"]
    assert [one for one in found if one.get("id") == "1"] == [
        {"id": "1", "outputs": ["text_output"], "text": ["ab "], "final": False},
        {"id": "1", "outputs": ["text_output"], "text": ["c "], "final": False},
        {"id": "1", "outputs": ["text_output", *rest], "text": [""], "final": True},
    ]
    (tags,) = (one for one in found if one.get("id") == "2")
    assert ("label" in tags["outputs"], tags["final"]) == (True, True)
    (error,) = (one["error"] for one in found if "error" in one)
    assert error.startswith("NOT_FOUND: no model 'x' is served here")
