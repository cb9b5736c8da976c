"""ModelStreamInfer: answers in pieces, before a real worker of fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tokenweir.open_inference import open_inference_pb2 as protocol

from server.adapters.config import KserveConfig
from tests.fakes.engines import FakeGenerator, FakePredictor, running_worker
from tests.fakes.kserve_calls import Stub, kserve_server, request, stub_of, tensor, texts, values
from tests.fakes.scripted_server import scripted_server

Piece = protocol.ModelStreamInferResponse


async def pieces_of(stub: Stub, *requests: protocol.ModelInferRequest) -> list[Piece]:
    return [piece async for piece in stub.ModelStreamInfer(iter(requests))]


async def rest_of(call: Any) -> list[Piece]:
    found = []
    while (piece := await call.read()) is not grpc.aio.EOF:
        found.append(piece)
    return found


def is_final(piece: Piece) -> bool:
    return piece.infer_response.parameters["triton_final_response"].bool_param


def text_input(text: str) -> protocol.ModelInferRequest.InferInputTensor:
    return tensor("text_input", "BYTES", (1, 1), bytes_contents=[text.encode()])


async def test_pieces_are_text_and_the_last_has_the_rest():
    asked = request("dates", texts("ab cde"), max_tokens=9)
    asked.id = "mine"
    generator = FakeGenerator()

    async with running_worker(generator) as (_, address), stub_of(address) as stub:
        found = await pieces_of(stub, asked)

    *pieces, last = found
    assert [values(one.infer_response, "text") for one in pieces] == [[b"ab "], [b"cde "]]
    assert [is_final(one) for one in found] == [False, False, True]
    assert {one.infer_response.id for one in found} == {"mine"}
    assert values(last.infer_response, "text") == [b""]
    assert values(last.infer_response, "finish_reason") == [b"eos"]
    assert values(last.infer_response, "num_tokens") == [2]
    assert last.infer_response.parameters["output_tokens"].int64_param == 2
    assert last.infer_response.parameters["request_id"].string_param == "mine"
    assert generator.requests[0].params.max_new_tokens == 9


@pytest.mark.parametrize("as_input", [True, False])
async def test_a_text_is_one_piece_where_no_stream_is_wanted(as_input: bool):
    if as_input:
        wanted = tensor("stream", "BOOL", (1,), bool_contents=[False])
        asked = request("dates", text_input("ab cde"), wanted)
    else:
        asked = request("dates", text_input("ab cde"), stream=False)

    async with running_worker(FakeGenerator()) as (_, address), stub_of(address) as stub:
        (found,) = await pieces_of(stub, asked)

    assert values(found.infer_response, "text_output") == [b"ab cde "]
    assert is_final(found)


async def test_outputs_that_were_not_asked_for_make_no_piece():
    asked = request("dates", texts("ab cde"))
    asked.outputs.add(name="num_tokens")

    async with running_worker(FakeGenerator()) as (_, address), stub_of(address) as stub:
        (found,) = await pieces_of(stub, asked)

    assert [one.name for one in found.infer_response.outputs] == ["num_tokens"]
    assert values(found.infer_response, "num_tokens") == [2]


async def test_requests_of_a_stream_run_beside_each_other_and_an_error_ends_one():
    generator = FakeGenerator()
    held, wrong, other = (
        request("dates", texts("HOLD")),
        request("dates", texts("a", "b")),
        request("tags", texts("a")),
    )
    held.id, wrong.id, other.id = "held", "wrong", "other"

    async with running_worker(generator, FakePredictor()) as (_, address):
        async with stub_of(address) as stub:
            call = stub.ModelStreamInfer()
            for one in (held, wrong, other):
                await call.write(one)
            found = {}
            for _ in range(2):
                piece = await call.read()
                found[piece.infer_response.id] = piece
            generator.release.set()
            await call.done_writing()
            rest = await rest_of(call)

    assert found["wrong"].error_message.startswith("INVALID_ARGUMENT: 2 texts with 1 outputs each")
    assert is_final(found["wrong"])
    assert values(found["other"].infer_response, "label") == [b"DET"]
    assert is_final(found["other"])
    assert {piece.infer_response.id for piece in rest} == {"held"}
    assert is_final(rest[-1])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("x", texts("a")), "NOT_FOUND: no model 'x' is served here"),
        (request("dates", texts("a"), best=1), "best: no parameter of a generation"),
        (request("dates", texts("a"), num_outputs=2), "1 texts with 2 outputs each"),
        (request("dates", texts("a"), seed=-1), "INVALID_ARGUMENT: seed=-1"),
        (request("dates", texts("a"), top_p=7.0), "INVALID_FIELD: top_p: 7"),
        (request("dates", texts("")), "INVALID_ARGUMENT"),
        (request("dates", texts("a"), stream="yes"), "stream is 'yes'; give true or false"),
        (request("dates", texts("a"), text_input("b")), "text and text_input are names of the"),
        (
            request("dates", texts("a"), max_tokens=3, max_new_tokens=3),
            "max_new_tokens and max_tokens are names of the same",
        ),
        (
            request("dates", texts("a"), tensor("max_tokens", "INT32", (2,), int_contents=[1, 2])),
            "max_tokens has 2 values; give one",
        ),
        (
            request(
                "dates",
                texts("a"),
                tensor("max_tokens", "INT32", (1,), int_contents=[1]),
                max_tokens=3,
            ),
            "max_tokens is an input and a parameter; give one of them",
        ),
    ],
)
async def test_an_error_is_the_last_piece_and_the_stream_goes_on(
    asked: protocol.ModelInferRequest, said: str
):
    asked.id = "wrong"
    async with running_worker(FakeGenerator()) as (_, address), stub_of(address) as stub:
        found = await pieces_of(stub, asked, request("dates", texts("a")))

    (error,) = (piece for piece in found if piece.error_message)
    assert said in error.error_message
    assert error.infer_response.id == "wrong"
    assert is_final(error)
    assert len(found) == 3


async def test_a_stream_is_not_what_model_infer_answers():
    async with running_worker(FakeGenerator()) as (_, address), stub_of(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="streams are ModelStreamInfer's"):
            await stub.ModelInfer(request("dates", texts("a"), stream=True))


async def test_a_client_that_leaves_a_stream_frees_the_engine():
    generator = FakeGenerator()
    async with running_worker(generator) as (_, address), stub_of(address) as stub:
        call = stub.ModelStreamInfer()
        await call.write(request("dates", texts("a HOLD")))
        assert values((await call.read()).infer_response, "text") == [b"a "]
        await asyncio.wait_for(generator.seen.wait(), 60)
        call.cancel()
        await asyncio.wait_for(generator.done.wait(), 60)

    assert len(generator.aborted) == 1


async def test_streams_and_their_requests_are_bounded():
    generator = FakeGenerator()
    config = KserveConfig(port=0, max_requests=1, grace=0)
    async with running_worker(generator) as (_, address), stub_of(address, config) as stub:
        call = stub.ModelStreamInfer()
        await call.write(request("dates", texts("HOLD")))
        await asyncio.wait_for(generator.seen.wait(), 60)
        await call.write(request("dates", texts("a")))
        refused = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as other:
            await pieces_of(stub, request("dates", texts("a")))
        generator.release.set()
        await call.done_writing()
        rest = await rest_of(call)

    assert refused.error_message.startswith("RESOURCE_EXHAUSTED: 1 calls are open here")
    assert other.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert is_final(rest[-1])


async def test_a_stream_is_called_with_the_token_and_the_deadline_of_its_caller():
    remaining: list[float] = []

    def answer(_: Any, context: grpc.ServicerContext) -> Any:
        remaining.append(context.time_remaining())
        context.abort(grpc.StatusCode.ABORTED, "no")

    with scripted_server() as script:
        script.answers["GenerateStream"] = answer
        async with stub_of(script.address, token="own") as stub:
            call = stub.ModelStreamInfer(
                iter([request("m", texts("a")), request("m", texts("a"), timeout=200_000_000)]),
                metadata=(("authorization", "Bearer theirs"),),
                timeout=400,
            )
            found = [piece.error_message async for piece in call]

    streams = [dict(one) for one in script.metadata]
    assert [one.partition(":")[0] for one in found] == ["ABORTED", "ABORTED"]
    assert {one["authorization"] for one in streams} == {"Bearer theirs"}
    assert sorted(round(one, -2) for one in remaining) == [200, 400]


async def test_a_stream_that_is_idle_does_not_hold_up_the_end_of_the_server():
    asked = request("dates", texts("a"), stream=False)
    async with asyncio.timeout(300), running_worker(FakeGenerator()) as (_, address):
        async with kserve_server(address, KserveConfig(port=0, grace=600)) as where:
            channel = grpc.aio.insecure_channel(where)
            call = Stub(channel).ModelStreamInfer()
            await call.write(asked)
            assert is_final(await call.read())
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await channel.close()
