"""The same load to a server of the Open Inference Protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir.open_inference import open_inference_pb2 as protocol

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError, NoServerError
from loadtest.load_report import LoadReport
from loadtest.reports.report import notes, print_table
from loadtest.runner import LoadTest
from loadtest.target.kserve_grpc import KserveGrpc
from loadtest.work.ask import Ask, InTurn, Method, Work, texts
from tests.fakes.engines import FakeGenerator, FakePredictor, prediction_package, running_worker
from tests.fakes.kserve_calls import kserve_server
from tests.fakes.scripted_server import ScriptedServer, scripted_server

Tensor = protocol.ModelMetadataResponse.TensorMetadata
Response = protocol.ModelInferResponse
Piece = protocol.ModelStreamInferResponse


def text(*values: str) -> Response:
    """Return texts as Triton does: raw."""
    output = Response.InferOutputTensor(name="text_output", datatype="BYTES", shape=[1])
    encoded = (value.encode() for value in values)
    raw = b"".join(struct.pack("<I", len(one)) + one for one in encoded)
    return Response(model_name="m", outputs=[output], raw_output_contents=[raw])


TEXT_INPUT = Tensor(name="text_input", datatype="BYTES", shape=[-1, 1])


def metadata(*inputs: Tensor) -> Callable[..., protocol.ModelMetadataResponse]:
    """Return an answer for ModelMetadata: a model m that gives a text."""
    outputs = [Tensor(name="text_output", datatype="BYTES", shape=[-1, 1])]

    def answer(request: Any, context: grpc.ServicerContext) -> protocol.ModelMetadataResponse:
        if request.name != "m":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        return protocol.ModelMetadataResponse(
            name="m", versions=["3"], inputs=inputs, outputs=outputs
        )

    return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that answers whole texts only."""
    with scripted_server() as running:
        running.answers["ModelMetadata"] = metadata(TEXT_INPUT)
        running.answers["ModelInfer"] = lambda request, context: text("ab")
        yield running


def load(server: ScriptedServer, work: Work, model: str = "m", **more: Any) -> LoadReport:
    address = f"kserve://{server.address}"
    config = LoadConfig(address, model, ClosedLoop(2), 3, timeout=60, **more)
    return LoadTest(config, work, client_arguments=lambda: {"token": "secret"}).run()


def test_texts_go_to_the_input_that_the_server_names(server: ScriptedServer):
    asks = InTurn("one", (Ask("p", options={"max_tokens": 5, "top_p": 0.5, "stop": ["x"]}),))

    report = load(server, asks)

    assert (report.num_failed, len(report.records)) == (0, 3)
    (sent,) = server.requests[-1].inputs
    assert (sent.name, sent.datatype, list(sent.shape)) == ("text_input", "BYTES", [1, 1])
    assert list(sent.contents.bytes_contents) == [b"p"]
    parameters = server.requests[-1].parameters
    assert parameters["max_tokens"].int64_param == 5
    assert parameters["top_p"].double_param == 0.5
    assert parameters["stop"].string_param == '["x"]'
    assert server.metadata[-1]["authorization"] == "Bearer secret"


def test_tokens_of_whole_answers_are_counted(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
):
    def counted(request: Any, context: grpc.ServicerContext) -> Response:
        found = text("ab")
        found.parameters["output_tokens"].int64_param = 7
        return found

    server.answers["ModelInfer"] = counted
    report = load(server, texts(("p",)))
    print_table(report)

    assert report.summary.output_tokens == 21
    assert "output tokens/s" in capsys.readouterr().out


def test_pieces_of_a_text_have_their_times(server: ScriptedServer):
    said = ("a", "b", "c", "")
    server.answers["ModelStreamInfer"] = lambda request, context: [
        Piece(infer_response=text(one)) for one in said
    ]
    report = load(server, InTurn("one", (Ask("p", expected={"text": "abc"}),)))

    assert [record.check for record in report.records] == ["right"] * 3
    assert {(len(one.token_times), one.output_tokens) for one in report.records} == {(3, 3)}
    first = report.summary.time_to_first_token
    assert first is not None and first.count == 3


@pytest.mark.parametrize("options", [{"stream": False}, {"num_outputs": 2}])
def test_what_cannot_come_in_pieces_is_asked_as_a_whole(
    options: dict[str, Any], server: ScriptedServer
):
    refusal = Piece(error_message="not to be streamed")
    server.answers["ModelStreamInfer"] = lambda request, context: [refusal]

    report = load(server, InTurn("one", (Ask("p", options=options),)))

    assert report.num_failed == 0 and report.summary.time_to_first_token is None


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("RESOURCE_EXHAUSTED/QUEUE_FULL: 9 wait", "RESOURCE_EXHAUSTED QUEUE_FULL", "9 wait"),
        ("INVALID_ARGUMENT: no such model", "INVALID_ARGUMENT", "no such model"),
        ("in ensemble: no memory", "UNKNOWN", "in ensemble: no memory"),
    ],
)
def test_an_error_of_a_stream_has_the_code_that_it_names(
    said: str, error: str, message: str, server: ScriptedServer
):
    failed = Piece(error_message=said)
    server.answers["ModelStreamInfer"] = lambda request, context: [failed]

    report = load(server, texts(("p",)))

    assert {(one.error, one.message) for one in report.records} == {(error, message)}


def test_tokens_that_the_server_had_kept_are_not_told(server: ScriptedServer):
    report = load(server, texts(("p",)))

    assert report.summary.cached_input_tokens is None
    assert "the server does not tell how many input tokens it had kept" in " ".join(notes(report))


def test_a_wrong_answer_is_found(server: ScriptedServer):
    answers = (Ask("p", expected={"text": "ab"}), Ask("q", expected={"text": "no"}))

    report = load(server, InTurn("two", answers))

    assert [record.check for record in sorted(report.records, key=lambda one: one.index)] == [
        *("right", "wrong", "right")
    ]


@pytest.mark.parametrize("method", ["classify", "label", "embed"])
def test_what_a_model_does_not_do_is_refused(method: Method, server: ScriptedServer):
    with pytest.raises(LoadTestError, match=f"'m' does not {method}: it gives text_output, and"):
        load(server, InTurn("one", (Ask("p", method=method),)))

    assert not [one for one in server.requests if isinstance(one, protocol.ModelInferRequest)]


def test_token_ids_need_an_input_for_them(server: ScriptedServer):
    ids = Tensor(name="ids", datatype="INT32", shape=[-1])
    server.answers["ModelMetadata"] = metadata(TEXT_INPUT, ids)
    report = load(server, InTurn("ids", (Ask((5, 6)),)))
    sent = server.requests[-1].inputs[0]
    assert (sent.name, list(sent.shape), list(sent.contents.int_contents)) == ("ids", [2], [5, 6])
    assert report.num_failed == 0

    server.answers["ModelMetadata"] = metadata(TEXT_INPUT)
    with pytest.raises(LoadTestError, match="takes no INT32 or INT64.*text_input BYTES"):
        load(server, InTurn("ids", (Ask((5, 6)),)))


def test_what_a_call_ends_with_is_counted(server: ScriptedServer):
    server.answers["ModelInfer"] = lambda request, context: context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "full"
    )

    report = load(server, texts(("p",)))

    assert {(one.status, one.message) for one in report.records} == {("RESOURCE_EXHAUSTED", "full")}


def test_a_model_or_a_server_that_is_not_there_is_named(server: ScriptedServer):
    with pytest.raises(LoadTestError, match="does not tell of model 'x': unknown model"):
        load(server, texts(("p",)), model="x")
    server.address = "127.0.0.1:1"
    with pytest.raises(NoServerError, match="no server answers at 127.0.0.1:1"):
        load(server, texts(("p",)))


@pytest.mark.parametrize(
    ("model", "method", "answer"),
    [
        ("dates", None, {"text": "ab c ", "finish_reason": "eos"}),
        ("tags", None, {"spans": 2}),
        ("tags", "embed", {"values": [3.0, 4.0]}),
        ("eyes", None, {"labels": 1}),
    ],
)
async def test_our_own_server_is_asked_for_all_that_it_does(
    model: str, method: Any, answer: dict[str, Any], tmp_path: Path
):
    image = tmp_path / "image.png"
    image.write_bytes(b"\x89PNG")
    prompt = image if model == "eyes" else "ab c"
    seer = FakePredictor(prediction_package("eyes", task="classify"))
    async with running_worker(FakeGenerator(), FakePredictor(), seer) as (_, address):
        async with kserve_server(address) as where:
            target = KserveGrpc(where, model, timeout=60)
            try:
                await target.find()
                reply = await target.send(Ask(prompt, method=method), keep=True)
            finally:
                await target.close()

    found = {
        name: len(value) if isinstance(answer[name], int) else value  # type: ignore[arg-type]
        for name, value in (reply.answer or {}).items()
    }
    assert found == answer
    assert reply.input_tokens > 0
    assert reply.output_tokens == len(reply.message_times) == (2 if model == "dates" else 0)
