"""Operators load, move and unload versions from the command line and from Python."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenweir import AsyncClient, Client, InvalidArgument
from tokenweir.v1 import admin_service_pb2 as pb

from server.cli.app import run
from tests.fakes.scripted_server import scripted_server
from tests.server.gateway.admin.test_loading import Served
from tests.server.gateway.admin.test_loading import served as served  # a fixture


async def _type(served: Served, *words: str) -> int:
    return await asyncio.to_thread(run, [*words, "--server", served.admin_address])


async def test_a_version_is_swapped_by_commands(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _type(served, "load-model", "dates-2", "--canary", "5") == 0
    assert await _type(served, "traffic", "dates", "2", "100") == 0
    assert await _type(served, "unload-model", "dates", "1") == 0

    assert capsys.readouterr().out.splitlines() == [
        "dates 2: ready, 5 % of the calls, workers: 1",
        "dates 1: ready, 0 % of the calls, workers: 1",
        "dates 2: ready, 100 % of the calls, workers: 1",
        "dates 2: ready, 100 % of the calls, workers: 1",
    ]
    assert await _type(served, "models") == 0
    assert "traffic      │ 100 % of the calls, workers: 1" in capsys.readouterr().out


async def test_json_has_the_models_as_the_client_returns_them(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _type(served, "load-model", "dates-2", "--replicas", "2", "--json") == 0
    loaded = json.loads(capsys.readouterr().out)
    assert await _type(served, "unload-model", "dates", "2", "--json") == 0
    left = json.loads(capsys.readouterr().out)

    assert loaded["traffic"] == {"share": 0.0, "replicas": 2}
    assert (left["model_version"], left["traffic"]["share"]) == ("1", 100.0)


async def test_what_is_refused_is_one_line_and_code_1(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _type(served, "load-model", "damaged") == 1
    assert await _type(served, "unload-model", "dte") == 1
    assert await _type(served, "load-model", "dates-2", "--canary", "101") == 2

    errors = capsys.readouterr().err
    assert "error: INVALID_ARGUMENT/INVALID_FIELD: package: damaged: decoder.onnx has" in errors
    assert "error: NOT_FOUND/MODEL_NOT_FOUND: no model 'dte' here; served: dates, other" in errors


async def test_a_check_and_the_end_of_a_model_are_told(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _type(served, "load-model", "dates-2", "--check") == 0
    assert await _type(served, "unload-model", "other") == 0

    assert capsys.readouterr().out.splitlines() == [
        "dates 2 can be loaded",
        f"{served.admin_address} serves no other any more",
    ]


async def test_the_clients_load_and_unload(served: Served) -> None:
    async with AsyncClient(served.admin_address) as client:
        info = await client.load_model("dates-2", model="iso", share=30)
        assert (info.model, info.traffic and info.traffic.share) == ("iso", 100)
        await client.unload_model("iso", timeout=9)
        with pytest.raises(InvalidArgument, match="leaves calls without a version"):
            await client.set_traffic("dates", "1", 50)


def test_a_directory_here_is_sent_as_the_server_finds_it_and_an_id_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dates-2").mkdir()
    monkeypatch.chdir(tmp_path)
    with scripted_server() as server:
        server.answers["LoadModel"] = lambda request, context: pb.LoadModelResponse()
        server.answers["UnloadModel"] = lambda request, context: pb.UnloadModelResponse()
        for package in ("dates-2", "s3://models/dates-2"):
            assert run(["load-model", package, "--server", server.address]) == 0
        with Client(server.address) as client:
            client.unload_model("dates", "1", request_id="mine")

    here, there, unload = server.requests
    assert here.package == str(tmp_path / "dates-2")
    assert there.package == "s3://models/dates-2"
    assert here.request_id != there.request_id != ""
    assert unload == pb.UnloadModelRequest(model="dates", model_version="1", request_id="mine")
    assert not here.HasField("share")
