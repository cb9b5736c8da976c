"""The KServe server answers the Open Inference Protocol, before a real worker of fakes."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image
from tokenweir import GeneratedSequence
from tokenweir._errors import error_from_call
from tokenweir.open_inference import open_inference_pb2 as protocol

from server.adapters.config import KserveConfig
from server.adapters.kserve import reading
from server.adapters.kserve.tasks import TASKS, Asked, run_task
from server.adapters.kserve.tensors import Tensor
from tests.fakes.engines import (
    FakeGenerator,
    FakePredictor,
    able,
    prediction_package,
    running_worker,
)
from tests.fakes.kserve_calls import (
    Stub,
    kserve_server,
    request,
    stub_of,
    tensor,
    texts,
    values,
)
from tests.fakes.scripted_server import fail, scripted_server

Output = protocol.ModelInferRequest.InferRequestedOutputTensor


@asynccontextmanager
async def stub_before(*engines: Any, config: KserveConfig | None = None) -> AsyncIterator[Stub]:
    async with running_worker(*engines) as (_, address):
        async with stub_of(address, config) as stub:
            yield stub


def seer() -> FakePredictor:
    return FakePredictor(prediction_package("eyes", task="classify"))


async def test_texts_are_generated_with_what_they_took():
    generator = able()
    asked = request("dates", texts("ab cde", "f"), num_outputs=2, temperature=0.5, seed=7)
    asked.id = "mine"

    async with stub_before(generator) as stub:
        found = await stub.ModelInfer(asked)

    assert values(found, "text") == [b"ab cde ", b"ab cde ", b"f ", b"f "]
    assert [list(output.shape) for output in found.outputs] == [[2, 2]] * 4
    assert values(found, "finish_reason") == [b"eos"] * 4
    assert values(found, "num_tokens") == [2, 2, 1, 1]
    assert values(found, "sum_logprob") == [-0.5, -1.0, -0.5, -1.0]
    assert (found.id, found.model_name, found.model_version) == ("mine", "dates", "7")
    assert found.parameters["input_tokens"].int64_param == 3
    assert found.parameters["output_tokens"].int64_param == 3
    assert generator.requests[0].params.temperature == 0.5
    assert found.parameters["request_id"].string_param == "mine"


async def test_where_an_item_has_fewer_outputs_its_row_is_filled():
    async def generate_many(*asked: Any, **options: Any) -> Any:
        one, other = (GeneratedSequence(text, (5,), "eos", None, -0.5) for text in "ab")
        results = [SimpleNamespace(sequences=rows) for rows in ((), (one, other), (one,))]
        return SimpleNamespace(
            results=results,
            usage=None,
            timing=mock.Mock(queue=0.0, prefill=0.0, decode=0.0),
            provenance=mock.Mock(),
            request_id="mine",
        )

    model = mock.Mock(architecture="decoder", capabilities=("generate",))
    model.limits.max_inputs = 64
    sent = Tensor("text", "BYTES", (3,), [b"x", b"y", b"z"])
    client = mock.Mock(generate_many=generate_many)

    found = await run_task(TASKS["generate"], client, Asked(model, {"text": sent}, {}, ["text"]))

    assert {output.shape for output in found.outputs} == {(3, 2)}
    assert [output.values for output in found.outputs] == [
        [b"", b"", b"a", b"b", b"a", b""],
        [b"", b"", b"eos", b"eos", b"eos", b""],
        [0, 0, 1, 1, 1, 0],
        [0, 0, -0.5, -0.5, -0.5, 0],
    ]


async def test_options_are_parameters_and_lists_of_them_json():
    generator = able()
    asked = request(
        "dates",
        texts("a"),
        stop="x",
        max_new_tokens=9,
        choice='["a", "b"]',
        logit_bias='{"5": -3}',
        stop_token_ids="[7]",
        include_stop=True,
    )

    async with stub_before(generator) as stub:
        await stub.ModelInfer(asked)

    params = generator.requests[0].params
    assert (params.max_new_tokens, params.include_stop) == (9, True)
    assert tuple(params.stop_strings) == ("x",)
    assert tuple(params.stop_token_ids) == (7,)
    assert dict(params.controls.logit_bias) == {5: -3.0}
    assert params.constraint is not None


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("is_raw", [False, True])
async def test_token_ids_are_rows_of_numbers(datatype: str, is_raw: bool):
    asked = request("dates", tensor("input_ids", datatype, (2, 2)))
    if is_raw:
        asked.inputs[0].ClearField("contents")
        asked.raw_input_contents.append(
            struct.pack("<4i" if datatype == "INT32" else "<4q", 4, 5, 6, 7)
        )
    else:
        field = "int_contents" if datatype == "INT32" else "int64_contents"
        getattr(asked.inputs[0].contents, field).extend([4, 5, 6, 7])

    async with stub_before(FakeGenerator()) as stub:
        found = await stub.ModelInfer(asked)

    if is_raw:
        raw = found.raw_output_contents[0]
        assert raw == b"".join(struct.pack("<I", 4) + text for text in (b"4 5 ", b"6 7 "))
    else:
        assert values(found, "text") == [b"4 5 ", b"6 7 "]


async def test_texts_are_labelled_and_embedded_by_the_outputs_that_are_asked_for():
    labels = request("tags", texts("ab c", "d"), stride=3)
    vectors = request("tags", texts("ab c", "d"), normalize=True)
    vectors.outputs.append(Output(name="embedding"))
    some = request("tags", texts("ab c"))
    some.outputs.extend([Output(name="label"), Output(name="item")])

    predictor = FakePredictor()
    async with stub_before(predictor) as stub:
        found = await stub.ModelInfer(labels)
        embedded = await stub.ModelInfer(vectors)
        few = await stub.ModelInfer(some)

    assert [item.stride for item in predictor.items] == [3, 3, None, None, None]
    assert values(found, "item") == [0, 0, 1]
    assert values(found, "start_byte") == [0, 3, 0]
    assert values(found, "end_byte") == [2, 4, 1]
    assert values(found, "label") == [b"DET"] * 3
    assert found.parameters["input_tokens"].int64_param == 10
    assert values(embedded, "embedding") == pytest.approx([0.6, 0.8, 0.6, 0.8])
    assert [list(one.shape) for one in embedded.outputs] == [[2, 2]]
    assert [one.name for one in few.outputs] == ["item", "label"]


@pytest.mark.parametrize(
    ("datatype", "contents"),
    [("UINT8", "uint_contents"), ("FP32", "fp32_contents"), ("UINT8", ""), ("FP32", "")],
)
@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (4, 3, 1)])
async def test_pixels_are_the_image_that_the_server_reads(
    datatype: str, contents: str, shape: tuple[int, ...]
):
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    sent = pixels.astype("<f4" if datatype == "FP32" else np.uint8)
    asked = request("eyes", tensor("image", datatype, shape), top=2)
    if contents:
        getattr(asked.inputs[0].contents, contents).extend(sent.reshape(-1).tolist())
    else:
        asked.inputs[0].ClearField("contents")
        asked.raw_input_contents.append(sent.tobytes())

    predictor = seer()
    async with stub_before(predictor) as stub:
        found = await stub.ModelInfer(asked)

    images = pixels if pixels.ndim == 4 else pixels[None]
    read = [np.asarray(Image.open(io.BytesIO(item.content))) for item in predictor.items]
    assert [one.tolist() for one in read] == [one.squeeze().tolist() for one in images]
    assert list(found.outputs[0].shape) == [len(images), 2]
    if contents:
        assert values(found, "label")[:2] == [b"DET", b"VERB"]
        assert values(found, "index")[:2] == [2, 1]


async def test_encoded_images_go_on_as_they_are():
    sent = io.BytesIO()
    Image.new("RGB", (2, 2)).save(sent, "PNG")
    predictor = seer()

    async with stub_before(predictor) as stub:
        asked = tensor("image", "BYTES", (1,), bytes_contents=[sent.getvalue()])
        await stub.ModelInfer(request("eyes", asked))

    assert [item.content for item in predictor.items] == [sent.getvalue()]


def pixels(num_images: int) -> protocol.ModelInferRequest.InferInputTensor:
    return tensor("image", "UINT8", (num_images, 1, 1, 1), uint_contents=[1] * num_images)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("dates"), "0 inputs of dates were given; give one of text, input_ids"),
        (request("dates", texts("a"), texts("b")), "inputs[1] (text): there is an input of this"),
        (
            request("dates", tensor("TEXT", "BYTES", (0,))),
            "TEXT is not an input of dates; its inputs",
        ),
        (request("dates", tensor("text", "BYTES", (2,), bytes_contents=[b"a"])), "shape [2]"),
        (request("dates", tensor("text", "BYTES", (-1,), bytes_contents=[b"a"])), "shape [-1]"),
        (
            request("dates", tensor("text", "BYTES", (1,) * 9, bytes_contents=[b"a"])),
            "9 dimensions",
        ),
        (request("dates", tensor("text", "BYTES", (2**62,) * 20_000)), "20,000 dimensions"),
        (request("dates", tensor("x" * 2**20, "BYTES", (0,))), "xxx..."),
        (request("dates", texts("a"), **{"y" * 2**20: 1}), "yyy..."),
        (request("dates", tensor("text", "BYTES", (1,), bytes_contents=[b"\xff"])), "not UTF-8"),
        (request("dates", tensor("text", "FP64", (0,))), "datatype 'FP64'"),
        (request("dates", tensor("text", "INT32", (1,), int_contents=[1])), "give BYTES"),
        (request("dates", tensor("input_ids", "FP32", (1,), fp32_contents=[1])), "INT64"),
        (request("dates", texts("a"), best=1), "best: no parameter of a generation"),
        (request("dates", texts("a"), tenant="x"), "tenant: no parameter"),
        (request("dates", texts("a"), logprobs=2), "logprobs: no parameter"),
        (request("dates", texts("a"), choice="a"), "parameter choice is 'a'; give its value as"),
        (request("dates", texts("a"), choice="[" * 100_000), "parameter choice is '[[[["),
        (request("dates", texts("a"), logit_bias="[1]"), "logit_bias is to be JSON"),
        (request("dates", texts("a"), seed=-1), "seed=-1"),
        (request("dates", texts("a"), top_p=7.0), "top_p: 7"),
        (request("dates", texts("a"), timeout=-1), "timeout (-1)"),
        (request("dates", texts()), "inputs"),
        (request("tags", texts("a"), seed=1), "seed: no parameter of a labelling"),
        (request("eyes", texts("a")), "text is not an input of eyes; its inputs are image"),
        (request("eyes", tensor("image", "UINT8", (1,), uint_contents=[1])), "is no image"),
        (request("eyes", tensor("image", "UINT8", (1, 1, 2), uint_contents=[1, 1])), "channels"),
        (request("eyes", tensor("image", "UINT8", (1, 1, 1), uint_contents=[256])), "0 to 255"),
        (request("eyes", tensor("image", "FP32", (1, 1, 1), fp32_contents=[0.5])), "0 to 255"),
        (request("eyes", tensor("image", "INT32", (1, 1, 1), int_contents=[1])), "0 to 255"),
        (request("eyes", tensor("image", "FP32", (1, 1, 1), fp32_contents=[300])), "0 to 255"),
        (request("eyes", pixels(2049)), "image has 2,049 items, more than 2,048; send fewer"),
    ],
)
async def test_what_is_wrong_is_named(asked: protocol.ModelInferRequest, said: str):
    async with stub_before(FakeGenerator(), FakePredictor(), seer()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(asked)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in refused.value.details()
    assert "decoding." not in refused.value.details()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([b"", b""], "2 entries for 1 inputs"),
        ([b"\x01\0\0\0a", b"x"], "2 entries for 1 inputs"),
        ([b"\x02\0\0\0a"], "an element of 2 bytes ends behind the data"),
        ([b"\x01\0\0\0ab"], "the last 1 bytes are no length"),
    ],
)
async def test_raw_contents_that_are_none_are_refused(raw: list[bytes], said: str):
    asked = request("dates", protocol.ModelInferRequest.InferInputTensor(name="text"))
    asked.inputs[0].datatype = "BYTES"
    asked.inputs[0].shape.append(1)
    asked.raw_input_contents.extend(raw)
    numbers = request("dates", tensor("input_ids", "INT32", (1,), int_contents=[1]))
    numbers.raw_input_contents.append(b"\0" * 4)

    async with stub_before(FakeGenerator()) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await stub.ModelInfer(asked)
        with pytest.raises(grpc.aio.AioRpcError, match="contents beside raw_input_contents"):
            await stub.ModelInfer(numbers)
        numbers.inputs[0].ClearField("contents")
        numbers.raw_input_contents[0] = b"\0" * 5
        with pytest.raises(grpc.aio.AioRpcError, match="5 bytes are no whole number of INT32"):
            await stub.ModelInfer(numbers)


async def test_outputs_of_two_tasks_come_in_one_answer():
    classifier = FakePredictor(prediction_package("moods", task="classify", takes="text"))
    async with stub_before(classifier) as stub:
        told = await stub.ModelMetadata(protocol.ModelMetadataRequest(name="moods"))
        asked = request("moods", texts("a"))
        asked.outputs.extend(Output(name=one.name) for one in told.outputs)
        found = await stub.ModelInfer(asked)
        statistics = await stub.ModelStatistics(protocol.ModelStatisticsRequest(name="moods"))

    assert [one.name for one in found.outputs] == ["label", "probability", "index", "embedding"]
    assert values(found, "label") == [b"DET"]
    assert values(found, "embedding") == pytest.approx([3.0, 4.0])
    assert found.parameters["input_tokens"].int64_param == 2 * 5
    (moods,) = statistics.model_stats
    outcomes = moods.inference_stats
    counted = (outcomes.success, outcomes.queue, outcomes.compute_input, outcomes.compute_infer)
    assert [one.count for one in counted] == [1, 1, 1, 1]
    # The fake waits for 10 ms and runs for 50 ms, by its own account.
    assert [one.ns for one in counted[1:]] == [20_000_000, 0, 100_000_000]


async def test_outputs_that_no_task_has_are_refused():
    asked = request("tags", texts("a"))
    asked.outputs.extend([Output(name="label"), Output(name="x")])

    async with stub_before(FakePredictor()) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="label, x are not what tags gives; it"):
            await stub.ModelInfer(asked)


async def test_the_server_and_its_models_are_described():
    async with stub_before(FakeGenerator(), FakePredictor(), seer()) as stub:
        assert (await stub.ServerLive(protocol.ServerLiveRequest())).live
        assert (await stub.ServerReady(protocol.ServerReadyRequest())).ready
        ready = {
            (name, version): (
                await stub.ModelReady(protocol.ModelReadyRequest(name=name, version=version))
            ).ready
            for name, version in (("dates", ""), ("dates", "7"), ("dates", "8"), ("x", ""))
        }
        server = await stub.ServerMetadata(protocol.ServerMetadataRequest())
        dates = await stub.ModelMetadata(protocol.ModelMetadataRequest(name="dates"))
        eyes = await stub.ModelMetadata(protocol.ModelMetadataRequest(name="eyes"))
        for wrong in ({"name": "x"}, {"name": "dates", "version": "8"}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelMetadata(protocol.ModelMetadataRequest(**wrong))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    assert list(ready.values()) == [True, True, False, False]
    assert server.name == "tokenweir"
    assert (dates.name, list(dates.versions), dates.platform) == ("dates", ["7"], "tokenweir_onnx")
    assert [one.name for one in dates.inputs] == [
        *("text", "input_ids", "text_input", "max_tokens", "stream")
    ]
    assert [one.name for one in dates.outputs][:2] == ["text", "finish_reason"]
    assert [(one.name, one.datatype, list(one.shape)) for one in eyes.inputs] == [
        ("image", "BYTES", [-1])
    ]
    assert [one.name for one in eyes.outputs] == ["label", "probability", "index", "embedding"]


async def test_nothing_is_ready_while_the_server_behind_is_not():
    async with stub_of("127.0.0.1:1") as stub:
        assert (await stub.ServerLive(protocol.ServerLiveRequest())).live
        assert not (await stub.ServerReady(protocol.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(protocol.ModelReadyRequest(name="m"))).ready
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request("m", texts("a")))

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    with scripted_server() as script:
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        script.answers["Check"] = lambda *_: health_pb2.HealthCheckResponse(status=status)
        async with stub_of(script.address) as stub:
            assert not (await stub.ServerReady(protocol.ServerReadyRequest())).ready
            assert not (await stub.ModelReady(protocol.ModelReadyRequest(name="m"))).ready


async def test_what_the_server_behind_refuses_is_told_with_its_details():
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="tokenweir")
    field = error_details_pb2.BadRequest.FieldViolation(field="a.b", description="no")
    wrong = error_details_pb2.BadRequest(field_violations=[field])
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    with scripted_server() as script:
        script.answers["Generate"] = lambda _, context: fail(
            context, code, "full", info, retry, wrong
        )
        async with stub_of(script.address) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(request("m", texts("a")))

    found = error_from_call(refused.value)
    assert (found.code, found.reason, found.retry_after) == (code, "QUEUE_FULL", 2.0)
    assert [one.field for one in found.violations] == ["a.b"]
    assert dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"] == "2000"
    assert refused.value.details().startswith("full")


async def test_who_calls_and_how_long_he_waits_is_told_to_the_server_behind():
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    remaining: list[float] = []

    def answer(_: object, context: grpc.ServicerContext) -> object:
        remaining.append(context.time_remaining())
        return fail(context, grpc.StatusCode.ABORTED, "no")

    with scripted_server() as script:
        script.answers["Generate"] = answer
        async with stub_of(script.address, token="own") as stub:
            for sent in ((), (("authorization", "Bearer theirs"), ("traceparent", trace))):
                with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                    await stub.ModelInfer(request("m", texts("a")), metadata=sent, timeout=400)
            with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                await stub.ModelInfer(request("m", texts("a"), timeout=200_000_000))
            for header in ("Basic eA==", "Bearer a b", "Bearer ", "Bearer"):  # are none
                with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                    sent = (("authorization", header),)
                    await stub.ModelInfer(request("m", texts("a")), metadata=sent, timeout=400)

    seen = [dict(one) for one in script.metadata]
    assert {one["authorization"] for one in seen} == {"Bearer own", "Bearer theirs"}
    assert [one.get("traceparent") for one in seen if one["authorization"] == "Bearer theirs"] == [
        trace
    ]
    assert [round(one, -2) for one in remaining] == [400, 400, 200, *[400] * 4]


async def test_a_client_that_goes_frees_the_engine():
    generator = FakeGenerator()
    async with stub_before(generator) as stub:
        call = stub.ModelInfer(request("dates", texts("HOLD")))
        await asyncio.wait_for(generator.seen.wait(), 60)
        call.cancel()
        await asyncio.wait_for(generator.done.wait(), 60)

    assert len(generator.aborted) == 1


async def test_requests_and_their_number_are_bounded():
    generator = FakeGenerator()
    config = KserveConfig(port=0, max_requests=1, max_request_bytes=1000, grace=0)
    async with stub_before(generator, config=config) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request("dates", texts("a" * 1000)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        call = stub.ModelInfer(request("dates", texts("HOLD")))
        await asyncio.wait_for(generator.seen.wait(), 60)
        with pytest.raises(
            grpc.aio.AioRpcError, match="1 calls are open here, the most that may be"
        ):
            await stub.ModelInfer(request("dates", texts("a")))
        assert (await stub.ServerLive(protocol.ServerLiveRequest())).live
        generator.release.set()
        await call


async def test_bytes_of_open_requests_are_bounded():
    generator = FakeGenerator()
    config = KserveConfig(port=0, max_open_bytes=1000, grace=0)
    async with stub_before(generator, config=config) as stub:
        call = stub.ModelInfer(request("dates", texts("HOLD")))
        await asyncio.wait_for(generator.seen.wait(), 60)
        with pytest.raises(grpc.aio.AioRpcError, match="more exceed 1,000") as refused:
            await stub.ModelInfer(request("dates", texts(1000 * "a")))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()


async def test_messages_are_read_so_many_at_once(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    from_string = protocol.ModelInferRequest.FromString

    def reads(data: bytes) -> protocol.ModelInferRequest:
        read.append(from_string(data).model_name)
        return from_string(data)

    monkeypatch.setattr(protocol.ModelInferRequest, "FromString", reads)
    config = KserveConfig(port=0, max_open_bytes=2000, max_request_bytes=1000, grace=0)
    async with running_worker(FakeGenerator()) as (_, address):
        async with kserve_server(address, config) as where:
            async with grpc.aio.insecure_channel(where) as channel:
                infer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
                silent = [infer() for _ in range(2)]
                await asyncio.gather(*(call.wait_for_connection() for call in silent))
                call = infer(iter([request("dates", texts("a")).SerializeToString()]))
                await asyncio.sleep(0.5)
                assert read == []
                silent[0].cancel()
                assert protocol.ModelInferResponse.FromString(await call).model_name == "dates"

    assert read == ["dates"]


async def test_a_message_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "_SECONDS", 0.1)
    async with kserve_server("127.0.0.1:1") as where:
        async with grpc.aio.insecure_channel(where) as channel:
            call = channel.stream_unary("/inference.GRPCInferenceService/ServerLive")()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the request did not come within 0.1 s"


async def test_a_call_without_a_message_is_ended():
    async with kserve_server("127.0.0.1:1") as where:
        async with grpc.aio.insecure_channel(where) as channel:
            call = channel.stream_unary("/inference.GRPCInferenceService/ServerLive")()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "the request has no message"
            assert (await Stub(channel).ServerLive(protocol.ServerLiveRequest())).live


async def test_models_are_configured_and_listed():
    async with stub_before(FakeGenerator(), seer()) as stub:
        found = (await stub.ModelConfig(protocol.ModelConfigRequest(name="dates"))).config
        eyes = (await stub.ModelConfig(protocol.ModelConfigRequest(name="eyes"))).config
        listed = await stub.RepositoryIndex(protocol.RepositoryIndexRequest(ready=True))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelConfig(protocol.ModelConfigRequest(name="dates", version="8"))

    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert (found.name, found.backend, found.max_batch_size) == ("dates", "tokenweir", 0)
    assert [(one.name, list(one.dims), one.optional) for one in found.input][:2] == [
        ("text", [-1], True),
        ("input_ids", [-1, -1], True),
    ]
    assert protocol.DataType.Name(found.input[0].data_type) == "TYPE_STRING"
    assert protocol.DataType.Name(found.output[3].data_type) == "TYPE_FP32"
    assert found.model_transaction_policy.decoupled
    assert [(one.name, one.optional) for one in eyes.input] == [("image", False)]
    assert not eyes.model_transaction_policy.decoupled
    assert [(one.name, one.version, one.state) for one in listed.models] == [
        ("dates", "7", "READY"),
        ("eyes", "1", "READY"),
    ]


async def test_health_and_reflection_are_those_of_every_server():
    async with running_worker(FakeGenerator()) as (_, address):
        async with kserve_server(address) as where, grpc.aio.insecure_channel(where) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            found = {
                name: (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("", "inference.GRPCInferenceService", "dates")
            }
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health.Check(health_pb2.HealthCheckRequest(service="x"))
            with pytest.raises(grpc.aio.AioRpcError) as watch:
                await anext(aiter(health.Watch(health_pb2.HealthCheckRequest())))
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (listed,) = [one async for one in reflect.ServerReflectionInfo(iter([asked]))]

    assert set(found.values()) == {health_pb2.HealthCheckResponse.SERVING}
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert watch.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert {one.name for one in listed.list_services_response.service} >= {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
    }

    async with kserve_server("127.0.0.1:1") as where, grpc.aio.insecure_channel(where) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_command_serves_until_it_is_told_to_end():
    async with running_worker(FakeGenerator()) as (_, address):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from server.cli import main; main()"),
            *("kserve", "--server", address, "--port", "0"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.readline(), 240)).decode()
        where = said.partition(" at ")[2].partition(",")[0]
        async with grpc.aio.insecure_channel(where) as channel:
            found = await Stub(channel).ModelInfer(request("dates", texts("a b")))
        process.terminate()
        _, rest = await asyncio.wait_for(process.communicate(), 240)

    assert values(found, "text") == [b"a b "]
    assert (process.returncode, rest) == (0, b"")
