"""The Open Inference Protocol over HTTP, before a real worker of fakes."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from server.adapters.config import HttpConfig
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
from tests.fakes.http_calls import Caller, http_server
from tests.fakes.scripted_server import fail, scripted_server

Json = dict[str, Any]
_SIZE = "Inference-Header-Content-Length"


def tensor(name: str, datatype: str, data: Any, *shape: int, **more: Any) -> Json:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data, **more}


def body(*inputs: Json, **more: Any) -> Json:
    return {"inputs": list(inputs), **more}


def texts(*values: str) -> Json:
    return tensor("text", "BYTES", list(values))


async def got(caller: Caller, path: str = "") -> tuple[int, Any]:
    async with caller.session.get(f"{caller.url}/v2{path}") as found:
        return found.status, await found.json()


async def infer(
    caller: Caller, model: str, asked: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    url = f"{caller.url}/v2/models/{model}/infer"
    async with caller.session.post(url, data=data, headers=headers) as found:
        return found.status, await found.json()


def output(found: Json, name: str) -> Json:
    (one,) = (one for one in found["outputs"] if one["name"] == name)
    return one


async def test_the_server_and_its_models_are_described():
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, address):
        async with http_server(address) as caller:
            assert await got(caller, "/health/live") == (200, {"live": True})
            assert await got(caller, "/health/ready") == (200, {"ready": True})
            assert (await got(caller))[1]["name"] == "tokenweir"
            for path in ("/models/dates", "/models/dates/versions/7"):
                status, dates = await got(caller, path)
                assert (status, dates["name"], dates["versions"]) == (200, "dates", ["7"])
                assert dates["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
                ready = {"name": "dates", "ready": True}
                assert await got(caller, f"{path}/ready") == (200, ready)
                _, config = await got(caller, f"{path}/config")
                assert config["input"][1]["optional"]
                assert config["model_transaction_policy"] == {"decoupled": True}
            for path in ("/models/dates/versions/8/ready", "/models/x/ready"):
                status, found = await got(caller, path)
                assert (status, found["ready"]) == (400, False)
            for path, said in (
                ("/models/x", "no model 'x' is served here; there are dates, tags"),
                ("/models/dates/versions/8", "dates has version 7, not 8"),
                ("/nowhere", "GET /v2/nowhere: Not Found"),
            ):
                assert await got(caller, path) == (404, {"error": said})
            async with caller.session.post(f"{caller.url}/v2/repository/index") as index:
                names = [(one["name"], one["version"], one["state"]) for one in await index.json()]

    assert names == [("dates", "7", "READY"), ("tags", "1", "READY")]


# What perf_analyzer reads of every model, present or not.
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
             "cache_hit", "cache_miss")  # fmt: skip


async def test_statistics_are_of_versions_that_are_served():
    async with running_worker(FakeGenerator()) as (_, address), http_server(address) as caller:
        statuses = [
            (await infer(caller, f"dates{version}", body(texts("a"))))[0]
            for version in ("", "/versions/7", "/versions/8", "/versions/9")
        ]
        status, found = await got(caller, "/models/dates/versions/7/stats")
        unknown = await got(caller, "/models/dates/versions/8/stats")

    assert statuses == [200, 200, 404, 404]
    (dates,) = found["model_stats"]
    outcomes = dates["inference_stats"]
    assert (status, sorted(outcomes)) == (200, sorted(DURATIONS))
    counts = [outcomes[name]["count"] for name in DURATIONS]
    assert counts == [2, 2, 2, 2, 2, 2, 0, 0]  # failures are of no version that a client made up
    assert unknown == (404, {"error": "dates has version 7, not 8"})


async def test_nothing_is_ready_while_the_server_behind_is_not():
    async with http_server("127.0.0.1:1") as caller:
        assert await got(caller, "/health/live") == (200, {"live": True})
        assert await got(caller, "/health/ready") == (400, {"ready": False})
        assert (await got(caller, "/models/m/ready"))[0] == 400
        status, found = await infer(caller, "m", body(texts("a")))

    assert status == 503
    assert isinstance(found["error"], str)


async def test_texts_are_generated_from_json():
    generator = FakeGenerator()
    generator.capabilities += OPTIONS
    asked = body(
        texts("ab cde", "f"),
        id="mine",
        parameters={"num_outputs": 2, "temperature": 0.5, "stop_token_ids": [7]},
    )

    async with running_worker(generator) as (_, address), http_server(address) as caller:
        status, found = await infer(caller, "dates", asked)

    assert status == 200
    assert output(found, "text") == {
        "name": "text",
        "datatype": "BYTES",
        "shape": [2, 2],
        "data": ["ab cde ", "ab cde ", "f ", "f "],
    }
    assert output(found, "num_tokens")["data"] == [2, 2, 1, 1]
    assert (found["id"], found["model_name"], found["model_version"]) == ("mine", "dates", "7")
    assert found["parameters"] == {"input_tokens": 3, "output_tokens": 3, "request_id": "mine"}
    assert generator.requests[0].params.temperature == 0.5
    assert tuple(generator.requests[0].params.stop_token_ids) == (7,)


async def test_binary_tensors_are_those_behind_the_json():
    names = [{"name": "embedding", "parameters": {"binary_data": True}}]
    one = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    pair = tensor("text_pair", "BYTES", ["x"])
    asked = json.dumps(body(one, pair, outputs=names)).encode()
    sent = asked + struct.pack("<I", 1) + b"a"

    async with running_worker(FakePredictor()) as (_, address), http_server(address) as caller:
        url = f"{caller.url}/v2/models/tags/infer"
        headers = {_SIZE: str(len(asked))}
        async with caller.session.post(url, data=sent, headers=headers) as found:
            size, answer = int(found.headers[_SIZE]), await found.read()

    told = json.loads(answer[:size])
    assert told["outputs"] == [
        {
            "name": "embedding",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {"binary_data_size": 8},
        }
    ]
    assert struct.unpack("<2f", answer[size:]) == (3.0, 4.0)


async def test_pixels_are_nested_numbers():
    pixels = [[[0], [255]], [[7], [8]]]
    eyes = FakePredictor(prediction_package("eyes", task="classify"))

    async with running_worker(eyes) as (_, address), http_server(address) as caller:
        asked = body(tensor("image", "UINT8", pixels, 2, 2, 1), outputs=[{"name": "label"}])
        _, found = await infer(caller, "eyes", asked)

    assert [one["name"] for one in found["outputs"]] == ["label"]
    assert output(found, "label")["data"][0] == "DET"


def binary(size: Any, data: bytes = b"", **more: Any) -> bytes:
    sent = {"name": "input_ids", "datatype": "INT32", "shape": [1]}
    asked = body(sent | {"parameters": {"binary_data_size": size}}, **more)
    return json.dumps(asked).encode() + data


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (b"{", "EOF"),
        ([], "Input should be an object"),
        ({}, "inputs: Field required"),
        (body({"name": "text"}), "inputs[0].datatype: Field required"),
        (body(texts("a") | {"data": [1]}), "inputs[0] (text): 1 is no value of BYTES"),
        (body(texts("a") | {"data": None}), "give its values as data, or with binary_data_size"),
        (body(texts("a") | {"shape": [2]}), "1 values are not of shape [2]"),
        (body(texts("a") | {"datatype": "FP64"}), "datatype 'FP64' is not taken"),
        (body(texts("a"), texts("b")), "there is an input of this name already"),
        (body(tensor("input_ids", "INT32", [2**31])), "a value is out of the range of INT32"),
        (body(tensor("input_ids", "INT32", [True])), "True is no value of INT32"),
        (body(tensor("input_ids", "INT32", [1.5])), "1.5 is no value of INT32"),
        (body(tensor("image", "UINT8", [256], 1, 1, 1)), "out of the range of UINT8"),
        (body(tensor("image", "FP32", [1e39], 1, 1, 1)), "out of the range of FP32"),
        (body(tensor("stream", "BOOL", [1])), "1 is no value of BOOL"),
        (body(tensor("text", "BYTES", [[[[[[[[["a"]]]]]]]]], 1)), "nested more than 8 times"),
        (
            body(texts("a") | {"parameters": {"shared_memory_region": "x"}}),
            "inputs[0].parameters.shared_memory_region: Extra inputs are not permitted",
        ),
        (binary(4), "binary_data_size is 4, and 0 bytes follow"),
        (binary(-1), "binary_data_size is -1"),
        (body(texts("a"), parameters={"best": 1}), "best: no parameter of a generation"),
        (body(texts("a"), parameters={"temperature": 0}), "temperature: 0 is not above 0"),
        (body(texts("a"), parameters={"stream": True}), "streams are ModelStreamInfer's"),
        (body(texts("a"), parameters={"timeout": -1}), "timeout (-1)"),
        (body(texts("a"), id="x" * 1000), "request_id"),
        (body(texts(" ")), "empty"),
        (body(texts("a"), outputs=[{"name": "embedding"}]), "embedding are not what dates gives"),
    ],
)
async def test_what_is_wrong_is_named(asked: Any, said: str):
    async with running_worker(FakeGenerator()) as (_, address), http_server(address) as caller:
        status, found = await infer(caller, "dates", asked)

    assert (status, list(found)) == (400, ["error"])
    assert said in found["error"]
    assert "decoding." not in found["error"]


async def test_bytes_that_no_input_has_are_refused():
    asked = binary(4)
    async with running_worker(FakeGenerator()) as (_, address), http_server(address) as caller:
        found = {
            size: await infer(caller, "dates", asked + b"\0" * 5, {_SIZE: size})
            for size in (str(len(asked)), "-1", "x", "9" * 30)
        }
        zipped = await infer(caller, "dates", asked, {"Content-Encoding": "gzip"})

    (_, said), *others = found.values()
    assert said == {"error": "1 bytes are of no input; give their binary_data_size there"}
    assert all(status == 400 for status, _ in found.values())
    assert all(_SIZE in one["error"] for _, one in others)
    assert zipped == (415, {"error": "a body of gzip is not taken; send it as it is"})


async def test_what_the_server_behind_refuses_has_a_status():
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="tokenweir")
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    with scripted_server() as script:
        script.answers["Generate"] = lambda _, context: fail(context, code, "full", info, retry)
        async with http_server(script.address, token="own") as caller:
            url = f"{caller.url}/v2/models/m/infer"
            headers = {"authorization": "Bearer theirs"}
            async with caller.session.post(url, json=body(texts("a")), headers=headers) as found:
                refused = found.status, found.headers["Retry-After"], await found.json()

    assert refused == (429, "2", {"error": "full"})
    assert {dict(one)["authorization"] for one in script.metadata} == {"Bearer theirs"}


async def test_a_client_that_goes_frees_the_engine():
    generator = FakeGenerator()
    async with running_worker(generator) as (_, address), http_server(address) as caller:
        call = asyncio.create_task(infer(caller, "dates", body(texts("HOLD"))))
        await asyncio.wait_for(generator.seen.wait(), 60)
        call.cancel()
        await asyncio.wait_for(generator.done.wait(), 60)

    assert len(generator.aborted) == 1


async def test_requests_and_their_number_are_bounded_and_counted():
    generator = FakeGenerator()
    config = HttpConfig(port=0, grace=1, max_requests=1, max_body_bytes=1000)
    async with running_worker(generator) as (_, address), http_server(address, config) as caller:
        long = await infer(caller, "dates", body(texts("a" * 1000)))
        call = asyncio.create_task(infer(caller, "dates", body(texts("HOLD"))))
        await asyncio.wait_for(generator.seen.wait(), 60)
        refused = await infer(caller, "dates", body(texts("a")))
        assert await got(caller, "/health/ready") == (200, {"ready": True})
        generator.release.set()
        assert (await call)[0] == 200
        async with caller.session.get(f"{caller.url}/metrics") as metrics:
            counted = await metrics.text()

    assert long[0] == 413
    assert "the body has more than 1,000 bytes" in long[1]["error"]
    error = {"error": "1 requests are open, as many as are taken at once"}
    assert refused == (503, error)
    route = 'route="/v2/models/{model}/infer"'
    for code in (200, 413, 503):
        assert f'tokenweir_http_requests_total{{{route},code="{code}"}} 1\n' in counted


async def test_a_tenant_has_no_more_requests_open_than_its_token_says(tmp_path: Path):
    (tokens := tmp_path / "tokens.toml").write_text(entry("tw_a", tenant="a", max_requests=1))
    generator = FakeGenerator()
    generator.capabilities += OPTIONS
    gateway = Gateway(GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens)))
    behind = f"127.0.0.1:{await gateway.start()}"
    async with running_worker(generator) as (_, worker), http_server(behind) as caller:
        await gateway.pool.sync([worker])
        own = {"authorization": "Bearer tw_a"}
        call = asyncio.create_task(infer(caller, "dates", body(texts("HOLD")), own))
        await asyncio.wait_for(generator.seen.wait(), 60)
        status, found = await infer(caller, "dates", body(texts("a")), own)
        generator.release.set()
        assert (await call)[0] == 200
        await gateway.close()

    assert status == 429
    assert "max_requests: 1" in found["error"] or "has 1 requests open" in found["error"]
