"""Requests that are wrong get an answer that says what and why, and the server goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2
from tokenweir.v1 import common_pb2, prediction_service_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from engine.errors import ConfigError
from server.calls import deadlines
from server.config import GatewayConfig, WorkerConfig
from server.gateway.gateway import Gateway
from server.telemetry.logs import TextFormatter
from server.worker.worker import Worker
from tests.fakes.calls import (
    Failure,
    Stubs,
    failure,
    failure_of,
    generate,
    stream,
    stubs_for,
    until,
)
from tests.fakes.engines import FakeGenerator, FakePredictor, prediction_package, running_worker
from tests.fakes.gateways import running_cell

GENERATE = "/tokenweir.v1.GenerationService/Generate"
GENERATE_STREAM = "/tokenweir.v1.GenerationService/GenerateStream"


@pytest.fixture
async def engine() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def stubs(engine: FakeGenerator) -> AsyncIterator[Stubs]:
    """Ask a worker through a gateway; in the end it must still serve."""
    digits = FakePredictor(prediction_package("digits", task="classify"))
    engines, config = (engine, FakePredictor(), digits), GatewayConfig(reflection=True)
    async with running_cell(engines, config=config) as cell:
        yield cell.stubs
        assert await cell.stubs.still_serves()


def _assert_invalid(failure: Failure, *fields: str) -> None:
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "INVALID_FIELD"
    assert set(failure.violations) == set(fields)
    assert failure.metadata["request_id"]


async def test_request_id_that_would_forge_a_line_of_the_log_stays_out_of_it(
    stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="server")

    failure = await failure_of(stubs.generation.Generate(generate("a", request_id="x\nforged")))

    _assert_invalid(failure, "request_id")

    def lines() -> str:
        return "".join(map(TextFormatter().format, caplog.records))

    await until(lambda: failure.metadata["request_id"] in lines())
    assert "forged" not in lines() + failure.metadata["request_id"]


async def test_prompt_too_long(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("word " * 17)))

    _assert_invalid(failure, "inputs[0].text")
    assert failure.violations["inputs[0].text"] == "17 tokens, at most 16"


async def test_prompt_too_long_in_a_stream_is_named_from_the_outer_message(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.GenerateStream(stream("word " * 17)))

    _assert_invalid(failure, "request.inputs[0].text")


async def test_empty_prompts_are_all_named(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("", "fine", "")))

    _assert_invalid(failure, "inputs[0].text", "inputs[2].text")


async def test_no_prompt_at_all(stubs: Stubs) -> None:
    nothing = await failure_of(stubs.generation.Generate(pb.GenerateRequest(model="dates")))
    unset = await failure_of(
        stubs.generation.Generate(pb.GenerateRequest(model="dates", inputs=[pb.Input()]))
    )

    _assert_invalid(nothing, "inputs")
    _assert_invalid(unset, "inputs[0]")


async def test_token_ids_out_of_the_vocabulary(stubs: Stubs) -> None:
    tokens = common_pb2.TokenIds(ids=[5, 100, -1])
    request = pb.GenerateRequest(model="dates", inputs=[pb.Input(tokens=tokens)])

    failure = await failure_of(stubs.generation.Generate(request))

    _assert_invalid(failure, "inputs[0].tokens.ids[1]", "inputs[0].tokens.ids[2]")


async def test_unknown_model_is_told_what_is_served(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("a", model="datse")))

    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert failure.message == "no model 'datse' here; served: dates, digits, tags"


async def test_a_model_name_as_long_as_a_message_may_be(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("a", model="😀" * 200_000)))

    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_no_model(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("a", model="")))

    _assert_invalid(failure, "model")


async def test_unknown_model_version(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("a", model_version="8")))

    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert failure.reason == "MODEL_VERSION_NOT_FOUND"
    assert "served: 7" in failure.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"decoding": {"sampling": {"temperature": 0.0}}}, "decoding.sampling.temperature"),
        ({"decoding": {"sampling": {"temperature": -1.0}}}, "decoding.sampling.temperature"),
        (
            {"decoding": {"sampling": {"temperature": float("nan")}}},
            "decoding.sampling.temperature",
        ),
        ({"decoding": {"sampling": {"top_k": -1}}}, "decoding.sampling.top_k"),
        ({"decoding": {"sampling": {"top_k": 101}}}, "decoding.sampling.top_k"),
        ({"decoding": {"sampling": {"top_p": 0.0}}}, "decoding.sampling.top_p"),
        ({"decoding": {"sampling": {"top_p": 1.1}}}, "decoding.sampling.top_p"),
        ({"decoding": {"sampling": {"min_p": 1.0}}}, "decoding.sampling.min_p"),
        ({"decoding": {"num_outputs": 0}}, "decoding.num_outputs"),
        ({"decoding": {"num_outputs": 2}}, "decoding.num_outputs"),
        ({"decoding": {"sampling": {}, "num_outputs": 9}}, "decoding.num_outputs"),
        ({"stopping": {"max_new_tokens": -1}}, "stopping.max_new_tokens"),
        ({"stopping": {"min_new_tokens": -1}}, "stopping.min_new_tokens"),
        ({"stopping": {"min_new_tokens": 5, "max_new_tokens": 4}}, "stopping.min_new_tokens"),
        ({"stopping": {"strings": ["x"] * 17}}, "stopping.strings"),
        ({"stopping": {"strings": ["x", ""]}}, "stopping.strings[1]"),
        ({"stopping": {"token_ids": [100]}}, "stopping.token_ids[0]"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
)
async def test_each_invalid_sampling_field_is_named(
    stubs: Stubs, fields: dict[str, Any], path: str
) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("a", **fields)))

    _assert_invalid(failure, path)


async def test_invalid_fields_are_named_together_and_in_streams_from_the_outer_message(
    stubs: Stubs,
) -> None:
    fields = {"decoding": {"sampling": {"top_p": 7.0, "min_p": -1.0}}}

    failure = await failure_of(stubs.generation.GenerateStream(stream("a", **fields)))

    _assert_invalid(failure, "request.decoding.sampling.top_p", "request.decoding.sampling.min_p")


async def test_malformed_bytes_of_a_unary_call(stubs: Stubs) -> None:
    failure = await failure_of(stubs.channel.unary_unary(GENERATE)(b"\xff\xff\xff\xff"))

    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "MALFORMED_MESSAGE"
    assert failure.message.startswith(f"request: 4 bytes are not a request of {GENERATE}")


async def test_malformed_bytes_of_a_stream(stubs: Stubs) -> None:
    failure = await failure_of(stubs.channel.unary_stream(GENERATE_STREAM)(b"\xff\xff\xff\xff"))

    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "MALFORMED_MESSAGE"


async def test_text_that_is_not_utf8(stubs: Stubs) -> None:
    good = generate("aaaa").SerializeToString()

    failure = await failure_of(
        stubs.channel.unary_unary(GENERATE)(good.replace(b"aaaa", b"\xff\xfe\xff\xfe"))
    )

    assert failure.reason == "MALFORMED_MESSAGE"


async def test_a_message_over_1_mib_is_refused_with_the_limit(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("x" * (1 << 20))))

    _assert_invalid(failure, "request")
    assert "more than 1,048,576" in failure.violations["request"]


async def test_a_message_over_4_mib_is_refused_before_it_is_read(stubs: Stubs) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stubs.generation.Generate(generate("x" * (1 << 22)))

    # gRPC itself refuses, so there are no details of ours.
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (caught.value.details() or "")


async def test_a_message_just_below_1_mib_is_read(stubs: Stubs) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("x " * (1 << 18))))

    _assert_invalid(failure, "inputs[0].text")


@pytest.fixture
def wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine end a call long before its client does, however busy the machine is."""
    monkeypatch.setattr(deadlines, "_ENGINE_MARGIN_SHARE", 0.95)
    monkeypatch.setattr(deadlines, "_MAX_ENGINE_MARGIN", 60.0)


@pytest.mark.usefixtures("wide_margin")
async def test_a_deadline_that_passes_while_running_is_told_before_the_client_gives_up(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    failure = await failure_of(stubs.generation.Generate(generate("HOLD"), timeout=10))

    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert failure.reason == "EXPIRED_IN_DECODE"
    assert len(engine.aborted) == 1


@pytest.mark.usefixtures("wide_margin")
async def test_a_deadline_that_passes_in_the_queue(stubs: Stubs, engine: FakeGenerator) -> None:
    engine.admit.clear()

    failure = await failure_of(stubs.generation.GenerateStream(stream("a"), timeout=10))
    engine.admit.set()

    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert failure.reason == "EXPIRED_IN_QUEUE"


async def test_a_deadline_that_has_passed_already(stubs: Stubs) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stubs.generation.Generate(generate("a"), timeout=-1)

    # The client does not even send it.
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_image_that_is_none(stubs: Stubs) -> None:
    items = [
        prediction_service_pb2.Item(image=b"\x89PNG..."),
        prediction_service_pb2.Item(image=b"MZ"),
    ]
    failure = await failure_of(
        stubs.prediction.Classify(
            prediction_service_pb2.ClassifyRequest(model="digits", items=items)
        )
    )

    _assert_invalid(failure, "items[1].image")


async def test_wrong_items_and_numbers(stubs: Stubs) -> None:
    request = prediction_service_pb2.ClassifyRequest(model="digits")
    _assert_invalid(await failure_of(stubs.prediction.Classify(request)), "items")

    request.items.add()
    _assert_invalid(await failure_of(stubs.prediction.Classify(request)), "items[0]")

    request.top = -1
    _assert_invalid(await failure_of(stubs.prediction.Classify(request)), "top")


async def test_unknown_methods_are_unimplemented(stubs: Stubs) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stubs.channel.unary_unary("/tokenweir.v1.GenerationService/Generat")(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use_is_named_and_its_owner_goes_on() -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        port = int(address.rpartition(":")[2])
        second = FakeGenerator()

        with pytest.raises(ConfigError, match=f"cannot listen on {address}: it is in use"):
            await Worker({"dates": second}, WorkerConfig(port=port)).start()
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: it is in use"):
            await Gateway(GatewayConfig(port=port)).start()

        assert not second.started
        async with stubs_for(address) as stubs:
            assert await stubs.still_serves()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_malformed_message_to_health_is_refused_without_a_traceback(
    method: str, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/grpc.health.v1.Health/{method}"

    if method == "Check":
        refused = await failure_of(stubs.channel.unary_unary(path)(b"\xff\xff"))
    else:
        refused = await failure_of(stubs.channel.unary_stream(path)(b"\xff\xff"))

    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.reason == "MALFORMED_MESSAGE"
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_malformed_message_to_reflection_is_refused_without_a_traceback(
    version: str, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    good = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()

    call = stubs.channel.stream_stream(path)(iter([good, b"\xff\xff"]))
    first = await call.read()
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()

    assert reflection_pb2.ServerReflectionResponse.FromString(first).list_services_response.service
    refused = failure(caught.value)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.reason == "MALFORMED_MESSAGE"
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []
