"""The same load to a server of the Open Inference Protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError, NoServerError
from loadtest.load_report import LoadReport
from loadtest.reports.report import notes, print_table
from loadtest.runner import run
from loadtest.target.kserve_grpc import KserveGrpc
from loadtest.work.ask import Ask, InTurn, Method, Work, texts
from tests.fakes.engines import FakeGenerator, FakePredictor, prediction_package, running_worker
from tests.fakes.kserve_calls import kserve_server

Tensor = protocol.ModelMetadataResponse.TensorMetadata
Response = protocol.ModelInferResponse
Piece = protocol.ModelStreamInferResponse


class ScriptedKserve(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with what a test scripts, and remembers what was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[protocol.ModelInferRequest] = []
        self.tokens: list[str | bytes | None] = []
        self.inputs = [Tensor(name="text_input", datatype="BYTES", shape=[-1, 1])]
        self.outputs = [Tensor(name="text_output", datatype="BYTES", shape=[-1, 1])]
        self.answer: Callable[[grpc.ServicerContext], Response] = lambda context: text("ab")
        self.pieces: Callable[[grpc.ServicerContext], Iterator[Piece]] = unimplemented

    def ModelMetadata(
        self, request: protocol.ModelMetadataRequest, context: grpc.ServicerContext
    ) -> protocol.ModelMetadataResponse:
        if request.name != "m":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        return protocol.ModelMetadataResponse(
            name="m", versions=["3"], inputs=self.inputs, outputs=self.outputs
        )

    def ModelInfer(
        self, request: protocol.ModelInferRequest, context: grpc.ServicerContext
    ) -> Response:
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        return self.answer(context)

    def ModelStreamInfer(
        self, requests: Iterator[protocol.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[Piece]:
        (request,) = requests
        yield from self.pieces(context)
        self.asked.append(request)


def unimplemented(context: grpc.ServicerContext) -> Iterator[Piece]:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")


def text(*values: str) -> Response:
    """Return texts as Triton does: raw."""
    output = Response.InferOutputTensor(name="text_output", datatype="BYTES", shape=[1])
    encoded = (value.encode() for value in values)
    raw = b"".join(struct.pack("<I", len(one)) + one for one in encoded)
    return Response(model_name="m", outputs=[output], raw_output_contents=[raw])


@pytest.fixture
def server() -> Iterator[ScriptedKserve]:
    script = ScriptedKserve()
    running = grpc.server(ThreadPoolExecutor(8))
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(script, running)
    script.address = f"kserve://127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield script
    running.stop(None).wait()


def load(server: ScriptedKserve, work: Work, model: str = "m", **more: Any) -> LoadReport:
    config = LoadConfig(server.address, model, ClosedLoop(2), 3, timeout=60, **more)
    return run(config, work, client_arguments=lambda: {"token": "secret"})


def test_texts_go_to_the_input_that_the_server_names(server: ScriptedKserve):
    asks = InTurn("one", (Ask("p", options={"max_tokens": 5, "top_p": 0.5, "stop": ["x"]}),))

    report = load(server, asks)

    assert (report.num_failed, len(report.records)) == (0, 3)
    (sent,) = server.asked[-1].inputs
    assert (sent.name, sent.datatype, list(sent.shape)) == ("text_input", "BYTES", [1, 1])
    assert list(sent.contents.bytes_contents) == [b"p"]
    parameters = server.asked[-1].parameters
    assert parameters["max_tokens"].int64_param == 5
    assert parameters["top_p"].double_param == 0.5
    assert parameters["stop"].string_param == '["x"]'
    assert server.tokens[-1] == "Bearer secret"


def test_tokens_of_whole_answers_are_counted(
    server: ScriptedKserve, capsys: pytest.CaptureFixture[str]
):
    def counted(context: grpc.ServicerContext) -> Response:
        found = text("ab")
        found.parameters["output_tokens"].int64_param = 7
        return found

    server.answer = counted
    report = load(server, texts(("p",)))
    print_table(report)

    assert report.summary.output_tokens == 21
    assert "output tokens/s" in capsys.readouterr().out


def test_pieces_of_a_text_have_their_times(server: ScriptedKserve):
    def pieces(context: grpc.ServicerContext) -> Iterator[Piece]:
        yield from (Piece(infer_response=text(said)) for said in ("a", "b", "c", ""))

    server.pieces = pieces
    report = load(server, InTurn("one", (Ask("p", expected={"text": "abc"}),)))

    assert [record.check for record in report.records] == ["right"] * 3
    assert {(len(one.token_times), one.output_tokens) for one in report.records} == {(3, 3)}
    first = report.summary.time_to_first_token
    assert first is not None and first.count == 3


@pytest.mark.parametrize("options", [{"stream": False}, {"num_outputs": 2}])
def test_what_cannot_come_in_pieces_is_asked_as_a_whole(
    options: dict[str, Any], server: ScriptedKserve
):
    server.pieces = lambda context: iter((Piece(error_message="not to be streamed"),))

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
    said: str, error: str, message: str, server: ScriptedKserve
):
    server.pieces = lambda context: iter((Piece(error_message=said),))

    report = load(server, texts(("p",)))

    assert {(one.error, one.message) for one in report.records} == {(error, message)}


def test_tokens_that_the_server_had_kept_are_not_told(server: ScriptedKserve):
    report = load(server, texts(("p",)))

    assert report.summary.cached_input_tokens is None
    assert "the server does not tell how many input tokens it had kept" in " ".join(notes(report))


def test_a_wrong_answer_is_found(server: ScriptedKserve):
    answers = (Ask("p", expected={"text": "ab"}), Ask("q", expected={"text": "no"}))

    report = load(server, InTurn("two", answers))

    assert [record.check for record in sorted(report.records, key=lambda one: one.index)] == [
        *("right", "wrong", "right")
    ]


@pytest.mark.parametrize("method", ["classify", "label", "embed"])
def test_what_a_model_does_not_do_is_refused(method: Method, server: ScriptedKserve):
    with pytest.raises(LoadTestError, match=f"'m' does not {method}: it gives text_output, and"):
        load(server, InTurn("one", (Ask("p", method=method),)))

    assert server.asked == []


def test_token_ids_need_an_input_for_them(server: ScriptedKserve):
    server.inputs.append(Tensor(name="ids", datatype="INT32", shape=[-1]))
    report = load(server, InTurn("ids", (Ask((5, 6)),)))
    sent = server.asked[-1].inputs[0]
    assert (sent.name, list(sent.shape), list(sent.contents.int_contents)) == ("ids", [2], [5, 6])
    assert report.num_failed == 0

    server.inputs.pop()
    with pytest.raises(LoadTestError, match="takes no INT32 or INT64.*text_input BYTES"):
        load(server, InTurn("ids", (Ask((5, 6)),)))


def test_what_a_call_ends_with_is_counted(server: ScriptedKserve):
    server.answer = lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    report = load(server, texts(("p",)))

    assert {(one.status, one.message) for one in report.records} == {("RESOURCE_EXHAUSTED", "full")}


def test_a_model_or_a_server_that_is_not_there_is_named(server: ScriptedKserve):
    with pytest.raises(LoadTestError, match="does not tell of model 'x': unknown model"):
        load(server, texts(("p",)), model="x")
    server.address = "kserve://127.0.0.1:1"
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
