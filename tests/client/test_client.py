"""The client against a real gRPC server with scripted answers."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from pathlib import Path

import grpc
import pytest
import tokenweir
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from tokenweir import (
    Aborted,
    AsyncClient,
    BrokenStream,
    Cancelled,
    Client,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidArgument,
    NotFound,
    NotSupported,
    PermissionDenied,
    ResourceExhausted,
    TokenweirClientError,
    Unauthenticated,
    Unavailable,
    WastedWork,
)
from tokenweir.v1 import (
    admin_service_pb2,
    common_pb2,
    generation_service_pb2,
    prediction_service_pb2,
)

from tests.fakes.scripted_server import (
    ScriptedServer,
    fail,
    list_models,
    scripted_server,
    stream_messages,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout=60) as opened:
        yield opened


def one_sequence(text: str = "2031-10-14") -> generation_service_pb2.GenerateResponse:
    sequence = generation_service_pb2.Sequence(
        text=text,
        tokens=common_pb2.TokenIds(ids=[5, 6]),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        stop_string="\n",
        sum_logprob=-0.5,
    )
    return generation_service_pb2.GenerateResponse(
        request_id="r",
        results=[generation_service_pb2.Result(sequences=[sequence])],
        usage=common_pb2.Usage(input_tokens=9, output_tokens=2),
        timing=common_pb2.Timing(steps=2, mean_batch_size=1.5),
        provenance=common_pb2.Provenance(model="m", manifest_sha256=b"\x01\xff", seed=3),
    )


def test_generate_returns_text_ids_reason_usage_timing_and_provenance(server, client):
    server.answers["Generate"] = lambda request, context: one_sequence()

    answer = client.generate("m", "tuesday 14 october 2031")

    assert answer.text == "2031-10-14"
    assert answer.token_ids == (5, 6)
    assert answer.finish_reason == "stop"
    assert answer.sequences[0].matched_stop == "\n"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (9, 2)
    assert (answer.timing.steps, answer.timing.mean_batch_size) == (2, 1.5)
    assert answer.provenance.manifest_sha256 == "01ff"
    assert is_dataclass(answer)


def test_options_arrive_in_their_fields(server, client):
    server.answers["Generate"] = lambda request, context: one_sequence()

    client.generate("m", [1, 2, 3], seed=2**64 - 1, model_version="3", request_id="mine")

    (request,) = server.requests
    assert list(request.inputs[0].tokens.ids) == [1, 2, 3]
    assert request.decoding.sampling.seed == 2**64 - 1
    assert not request.decoding.sampling.HasField("top_p")
    assert not request.stopping.HasField("max_new_tokens")
    assert (request.model_version, request.request_id) == ("3", "mine")
    assert request.output.token_ids


def test_every_call_has_a_request_id_of_its_own(server, client):
    server.answers["Generate"] = lambda request, context: one_sequence()

    client.generate("m", "p")
    client.generate("m", "p")

    ids = {request.request_id for request in server.requests}
    assert len(ids) == 2 and "" not in ids


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_unknown_option_is_a_type_error_that_lists_the_known_ones(client, method):
    with pytest.raises(TypeError, match="unknown option temprature; known are .*temperature"):
        getattr(client, method)("m", "p", temprature=1.0)


def test_unknown_option_of_a_prediction_is_a_type_error(client):
    with pytest.raises(TypeError, match="unknown option temperature; known are .*top"):
        client.classify("m", "p", temperature=1.0)


def test_prompt_of_a_wrong_type_is_refused(client):
    with pytest.raises(TypeError, match="prompt=.* is neither a text nor"):
        client.generate("m", ["two", "prompts"])


def test_answers_that_do_not_add_up_are_broken(server, client):
    answer = one_sequence()
    answer.results[0].sequences[0].alignment.extend([0.5, 0.5, 1.0])
    answer.results[0].sequences[0].alignment_columns = 2
    server.answers["Generate"] = lambda request, context: answer
    server.answers["Score"] = lambda request, context: generation_service_pb2.ScoreResponse()

    with pytest.raises(BrokenStream, match="3 values of alignment are no rows of 2"):
        client.generate("m", "p", alignment=True)
    with pytest.raises(BrokenStream, match="0 results came back for one item"):
        client.score("m", "p", "t")


def test_classify_label_and_embed(server, client):
    positive = prediction_service_pb2.ScoredLabel(label="positive", probability=0.75, index=1)
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes(labels=[positive])]
    )
    server.answers["Label"] = lambda request, context: prediction_service_pb2.LabelResponse(
        results=[
            prediction_service_pb2.LabelResponse.Spans(
                spans=[
                    prediction_service_pb2.LabelResponse.Span(
                        start_byte=4, end_byte=7, label=positive
                    )
                ]
            )
        ]
    )
    server.answers["Embed"] = lambda request, context: prediction_service_pb2.EmbedResponse(
        vectors=[prediction_service_pb2.EmbedResponse.Vector(values=[0.5, -1.0])]
    )

    assert client.classify("m", "good", top=0).label == "positive"
    (span,) = client.label("m", "où été").spans  # "où " is four bytes
    assert (span.text, span.label.label) == ("ét", "positive")
    assert client.embed("m", "good", normalize=True).values == (0.5, -1.0)
    assert server.requests[0].top == 0 and server.requests[0].HasField("top")
    assert server.requests[2].normalize


def test_image_is_given_as_bytes_or_as_a_path(server, client, tmp_path: Path):
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )
    (tmp_path / "image.png").write_bytes(b"png")

    client.classify("m", b"png")
    client.classify("m", tmp_path / "image.png")

    assert [request.items[0].image for request in server.requests] == [b"png", b"png"]


def test_models_follows_the_pages(server, client):
    def pages(request, context):
        last = request.page_token == "more"
        return admin_service_pb2.ListModelsResponse(
            models=[admin_service_pb2.ModelInfo(model="b" if last else "a", state=3)],
            next_page_token="" if last else "more",
        )

    server.answers["ListModels"] = pages

    assert [(m.model, m.state, m.parity) for m in client.models()] == [
        ("a", "ready", None),
        ("b", "ready", None),
    ]


def test_server_info_load_and_health(server, client):
    server.answers["GetServerInfo"] = lambda request, context: (
        admin_service_pb2.GetServerInfoResponse(version="1.2", features=["drain"])
    )
    server.answers["GetLoad"] = lambda request, context: admin_service_pb2.GetLoadResponse(
        replicas=[
            admin_service_pb2.GetLoadResponse.ReplicaLoad(
                replica_id="a",
                running=3,
                wasted=admin_service_pb2.GetLoadResponse.WastedWork(expired_tokens=5),
            )
        ]
    )
    server.answers["Check"] = lambda request, context: health_pb2.HealthCheckResponse(status=2)

    assert client.server_info().version == "1.2"
    assert client.server_info().features == ("drain",)
    assert client.load()[0].running == 3
    assert client.load()[0].wasted == WastedWork(expired_tokens=5)
    assert client.health("m") == "NOT_SERVING"


def test_unknown_enum_value_of_a_newer_server_is_its_number(server, client):
    answer = one_sequence()
    answer.results[0].sequences[0].finish_reason = 99
    server.answers["Generate"] = lambda request, context: answer

    assert client.generate("m", "p").finish_reason == "99"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, NotSupported),
        (grpc.StatusCode.ABORTED, Aborted),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, Internal),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.OUT_OF_RANGE, TokenweirClientError),
    ],
)
def test_every_status_has_its_exception(server, code, expected):
    info = error_details_pb2.ErrorInfo(
        reason="SOME_REASON", domain="tokenweir", metadata={"model": "m"}
    )
    server.answers["Generate"] = lambda request, context: fail(context, code, "so it is", info)

    with (
        Client(server.address, max_attempts=1) as client,
        pytest.raises(TokenweirClientError) as caught,
    ):
        client.generate("m", "p")

    assert type(caught.value) is expected
    assert caught.value.code is code
    assert caught.value.reason == "SOME_REASON"
    assert caught.value.metadata == {"model": "m"}
    assert str(caught.value) == f"{code.name}/SOME_REASON: so it is"


def test_tree_in_the_docstring_has_every_exception():
    named = {
        name
        for name in tokenweir.__all__
        if isinstance(getattr(tokenweir, name), type)
        and issubclass(getattr(tokenweir, name), Exception)
    }

    assert len(named) == 13
    assert all(name in tokenweir.__doc__ for name in named)


def test_violations_are_readable(server, client):
    bad = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="a.b", description="too small"),
            error_details_pb2.BadRequest.FieldViolation(field="c", description="too big"),
        ]
    )
    server.answers["Generate"] = lambda request, context: fail(
        context, grpc.StatusCode.INVALID_ARGUMENT, "2 fields are wrong", bad
    )

    with pytest.raises(InvalidArgument) as caught:
        client.generate("m", "p")

    assert caught.value.violations == (
        FieldViolation("a.b", "too small"),
        FieldViolation("c", "too big"),
    )
    assert "a.b: too small\n  c: too big" in str(caught.value)


def test_a_violation_that_was_cut_is_not_said_twice(server, client):
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="a", description="it is too...")
    server.answers["Generate"] = lambda request, context: fail(
        context, grpc.StatusCode.INVALID_ARGUMENT, "a: it is too long", bad
    )

    with pytest.raises(InvalidArgument) as caught:
        client.generate("m", "p")

    assert caught.value.message == "a: it is too long"


def test_refusal_says_when_to_come_back(server):
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    server.answers["Generate"] = lambda request, context: fail(
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry
    )

    with (
        Client(server.address, max_attempts=1) as client,
        pytest.raises(ResourceExhausted) as caught,
    ):
        client.generate("m", "p")

    assert caught.value.retry_after == 1.5


def test_a_message_larger_than_the_server_reads_is_wrong_and_no_want_of_room(server, client):
    with pytest.raises(InvalidArgument, match="takes 4,194,304 at most; send less") as caught:
        client.generate("m", "x" * 2**22)

    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert "4,194,3" in str(caught.value)


def test_an_answer_may_be_larger_than_what_other_clients_take(server, client):
    server.answers["Generate"] = lambda request, context: one_sequence("a" * 22_000_000)

    assert len(client.generate("m", "p").text) == 22_000_000


def test_status_details_that_are_garbage_do_not_hide_the_error(server, client):
    def garbage(request, context):
        context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff\xff")])
        context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    server.answers["Generate"] = garbage

    with pytest.raises(NotFound, match="nothing here") as caught:
        client.generate("m", "p")
    assert caught.value.reason == ""


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # says gRPC of a call that came while the server closed
    ],
)
def test_call_that_fails_twice_is_tried_again_under_the_same_request_id(server, client, code):
    def third_time(request, context):
        if len(server.requests) < 3:
            context.abort(code, "not now")
        return one_sequence("at last")

    server.answers["Generate"] = third_time

    assert client.generate("m", "p").text == "at last"
    assert len({request.request_id for request in server.requests}) == 1


def test_stream_that_has_not_begun_is_tried_again(server, client):
    def second_time(request, context):
        if len(server.requests) < 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return stream_messages(["a"])

    server.answers["GenerateStream"] = second_time

    assert list(client.stream("m", "p")) == ["a"]


def test_stream_that_has_begun_is_not_tried_again(server, client):
    def broken(request, context):
        yield next(stream_messages(["a"]))
        context.abort(grpc.StatusCode.UNAVAILABLE, "the replica is gone")

    server.answers["GenerateStream"] = broken
    stream = client.stream("m", "p")

    assert next(stream) == "a"
    with pytest.raises(Unavailable, match="the replica is gone"):
        next(stream)
    assert len(server.requests) == 1


def test_push_back_of_the_server_is_honoured(server, client):
    def push_back(request, context):
        if len(server.requests) < 2:
            context.set_trailing_metadata([("grpc-retry-pushback-ms", "400")])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return one_sequence()

    server.answers["Generate"] = push_back
    begin = time.monotonic()

    client.generate("m", "p")

    assert time.monotonic() - begin >= 0.39


def test_wrong_request_is_not_tried_again(server, client):
    server.answers["Generate"] = lambda request, context: fail(
        context, grpc.StatusCode.INVALID_ARGUMENT, "wrong"
    )

    with pytest.raises(InvalidArgument):
        client.generate("m", "p")
    assert len(server.requests) == 1


def test_a_deadline_that_the_server_sees_first_is_a_deadline(server):
    def cancel(request, context):
        time.sleep(0.29)
        context.abort(grpc.StatusCode.CANCELLED, "")

    server.answers["Generate"] = server.answers["GenerateStream"] = cancel

    with Client(server.address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("m", "p")
        with pytest.raises(DeadlineExceeded):
            list(client.stream("m", "p"))


def test_a_call_cancelled_long_before_its_deadline_is_cancelled(server, client):
    def cancel(request, context):
        context.abort(grpc.StatusCode.CANCELLED, "")

    server.answers["Generate"] = cancel

    with pytest.raises(Cancelled):
        client.generate("m", "p")


def test_one_attempt_means_no_retry(server):
    server.answers["Generate"] = lambda request, context: fail(
        context, grpc.StatusCode.UNAVAILABLE, "not now"
    )

    with Client(server.address, max_attempts=1) as client, pytest.raises(Unavailable):
        client.generate("m", "p")
    assert len(server.requests) == 1


@pytest.mark.parametrize("attempts", [0, 6])
def test_impossible_number_of_attempts_is_refused(attempts):
    with pytest.raises(ValueError, match=rf"max_attempts \({attempts}\) must be 1, no retry, to 5"):
        Client("127.0.0.1:1", max_attempts=attempts)


def test_deadline_of_a_call(server, client):
    released = threading.Event()
    server.answers["Generate"] = lambda request, context: released.wait(60) and one_sequence()

    with pytest.raises(DeadlineExceeded, match="before the answer was complete; allow more time"):
        client.generate("m", "p", timeout=0.2)
    released.set()


@pytest.mark.parametrize("address", ["127.0.0.1:115587", "[::1]:65536", "dns:///host:99999"])
def test_a_port_that_cannot_be_is_refused(address):
    with pytest.raises(ValueError, match=f"the port of {re.escape(address)} is above 65535"):
        Client(address)


def test_nobody_at_the_address():
    with Client("127.0.0.1:1", timeout=60) as client, pytest.raises(Unavailable) as caught:
        client.models()
    assert caught.value.retry_after is None


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_proxy_is_not_asked_for_this_machine(server, monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")

    with Client(server.address, timeout=60) as client:
        assert len(client.models()) == 1


def test_stream_gives_the_pieces_in_order_then_the_result(server, client):
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["14", "", " O"])
    stream = client.stream("m", "p", tokens_per_message=2)

    with pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.result
    assert list(stream) == ["14", " O"]

    assert stream.result.text == "14 O"
    assert stream.result.token_ids == (1, 2, 3)
    assert stream.result.finish_reason == "eos"
    assert stream.result.usage.output_tokens == 3
    assert stream.result.timing.queue == 0.003
    assert stream.result.provenance.seed == 11
    assert server.requests[0].tokens_per_message == 2
    assert list(stream) == []


def test_stream_of_several_outputs_is_refused(client):
    with pytest.raises(ValueError, match="num_outputs=2: a stream gives the pieces of one output"):
        client.stream("m", "p", num_outputs=2)


def test_gap_in_a_stream_is_noticed(server, client):
    def gap(request, context):
        messages = list(stream_messages(["a", "b", "c"]))
        yield from [messages[0], *messages[2:]]

    server.answers["GenerateStream"] = gap
    stream = client.stream("m", "p")

    assert next(stream) == "a"
    with pytest.raises(BrokenStream, match="message 3 came where 2 was due"):
        next(stream)


def test_stream_without_its_end_is_noticed(server, client):
    server.answers["GenerateStream"] = lambda request, context: list(stream_messages(["a"]))[:1]

    with pytest.raises(BrokenStream, match="without its end of the sequence"):
        list(client.stream("m", "p"))


class Endless:
    """An answer that goes on until its call is cancelled."""

    def __init__(self, pause: float = 0.01) -> None:
        self.cancelled = threading.Event()
        self._pause = pause

    def __call__(self, request, context):
        context.add_callback(self.cancelled.set)
        for message in stream_messages(["x"] * 100_000):
            yield message
            if self.cancelled.wait(self._pause):
                return


def test_closing_a_stream_early_cancels_the_call_at_the_server(server, client):
    endless = server.answers["GenerateStream"] = Endless()

    with client.stream("m", "p") as stream:
        assert next(stream) == "x"

    assert endless.cancelled.wait(60)
    assert list(stream) == []


async def test_async_client_has_the_same_calls(server):
    server.answers["Generate"] = lambda request, context: one_sequence()
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
    server.answers["Embed"] = lambda request, context: prediction_service_pb2.EmbedResponse(
        vectors=[prediction_service_pb2.EmbedResponse.Vector(values=[1.0])]
    )
    server.answers["Label"] = lambda request, context: prediction_service_pb2.LabelResponse(
        results=[prediction_service_pb2.LabelResponse.Spans()]
    )
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )
    server.answers["GetServerInfo"] = lambda request, context: (
        admin_service_pb2.GetServerInfoResponse(version="1.2")
    )
    server.answers["GetLoad"] = lambda request, context: admin_service_pb2.GetLoadResponse()
    server.answers["Check"] = lambda request, context: health_pb2.HealthCheckResponse(status=1)

    async with AsyncClient(server.address, timeout=60) as client:
        stream = client.stream("m", "p")
        assert (await client.generate("m", "p")).text == "2031-10-14"
        assert [piece async for piece in stream] == ["a", "b"]
        assert stream.result.text == "ab"
        assert (await client.embed("m", "p")).values == (1.0,)
        assert (await client.label("m", "p")).spans == ()
        assert (await client.classify("m", "p")).labels == ()
        assert [model.model for model in await client.models()] == ["m"]
        assert (await client.server_info()).version == "1.2"
        assert await client.load() == ()
        assert await client.health() == "SERVING"


async def test_async_client_raises_the_same_exceptions(server):
    info = error_details_pb2.ErrorInfo(reason="MODEL_NOT_FOUND", domain="tokenweir")
    server.answers["GenerateStream"] = lambda request, context: fail(
        context, grpc.StatusCode.NOT_FOUND, "no model p; there are: m", info
    )
    server.answers["ListModels"] = lambda request, context: fail(
        context, grpc.StatusCode.INTERNAL, "broken", info
    )

    async with AsyncClient(server.address, timeout=60) as client:
        with pytest.raises(NotFound, match="no model p") as caught:
            await anext(client.stream("p", "p"))
        assert caught.value.reason == "MODEL_NOT_FOUND"
        with pytest.raises(NotFound):
            await anext(client.stream_events("p", "p"))
        with pytest.raises(Internal):
            await client.models()


async def test_closing_an_async_stream_early_cancels_the_call_at_the_server(server):
    endless = server.answers["GenerateStream"] = Endless()

    async with AsyncClient(server.address, timeout=60) as client:
        async with client.stream("m", "p") as stream:
            assert await anext(stream) == "x"
        assert await asyncio.to_thread(endless.cancelled.wait, 60)
        assert [piece async for piece in stream] == []


@pytest.mark.parametrize("pause", [0.01, 10.0])
async def test_cancelling_the_reader_of_an_async_stream_cancels_the_call(server, pause):
    """... between two messages if one comes soon, and without one soon after."""
    endless = server.answers["GenerateStream"] = Endless(pause)

    async with AsyncClient(server.address, timeout=60) as client:
        stream = client.stream("m", "p")
        assert await anext(stream) == "x"

        async def read_all() -> None:
            async for _ in stream:
                pass

        reader = asyncio.create_task(read_all())
        await asyncio.sleep(0.05)
        reader.cancel()

        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(endless.cancelled.wait, 60)


async def test_async_client_may_be_made_before_its_event_loop(server):
    server.answers["ListModels"] = list_models("a", "b")
    client = await asyncio.to_thread(AsyncClient, server.address)  # a thread without a loop

    async with client:
        assert len(await client.models()) == 2


def test_importing_the_client_imports_nothing_heavy():
    code = (
        "import tokenweir, sys;"
        "heavy = {'ray', 'onnxruntime', 'torch', 'numpy', 'transformers', 'tokenizers'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_metadata_goes_with_every_call(server):
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["a"])

    with Client(server.address, timeout=60, metadata=[("authorization", "token")]) as client:
        client.models()
        list(client.stream("m", "p"))

    assert [sent["authorization"] for sent in server.metadata] == ["token", "token"]


async def test_metadata_goes_with_every_call_of_the_async_client(server):
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["a"])

    async with AsyncClient(server.address, timeout=60, metadata=[("tenant", "t")]) as client:
        await client.models()
        [piece async for piece in client.stream("m", "p")]
        [message async for message in client.stream_events("m", "p")]

    assert [sent["tenant"] for sent in server.metadata] == ["t", "t", "t"]


def test_a_channel_takes_the_place_of_an_address_and_is_closed_with_the_client(server):
    channel = grpc.insecure_channel(server.address)

    with Client(channel=channel) as client:
        assert len(client.models()) == 1

    with pytest.raises(ValueError, match="closed"):
        channel.unary_unary("/a/B")(b"")


async def test_a_channel_takes_the_place_of_an_address_of_the_async_client(server):
    async with AsyncClient(channel=grpc.aio.insecure_channel(server.address)) as client:
        assert len(await client.models()) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_or_a_channel_is_given_and_not_both(kind):
    channel = grpc.insecure_channel("127.0.0.1:1")

    with pytest.raises(ValueError, match="give an address"):
        kind()
    with pytest.raises(ValueError, match="give it alone"):
        kind("127.0.0.1:1", channel=channel)
    with pytest.raises(ValueError, match="give it alone"):
        kind(channel=channel, credentials=grpc.ssl_channel_credentials())
    channel.close()


def test_credentials_encrypt(server):
    credentials = grpc.ssl_channel_credentials()

    with Client(server.address, credentials=credentials, timeout=60, max_attempts=1) as client:
        with pytest.raises(Unavailable):  # this server speaks no TLS
            client.models()


def test_a_closed_client_says_so(server):
    client = Client(server.address)
    client.close()
    client.close()

    with pytest.raises(ValueError, match="the client is closed"):
        client.models()
    with pytest.raises(ValueError, match="the client is closed"):
        client.stream("m", "p")


@pytest.mark.parametrize("is_used", [False, True])
async def test_a_closed_async_client_says_so(server, is_used):
    client = AsyncClient(server.address)
    if is_used:
        await client.models()
    await client.close()
    await client.close()

    with pytest.raises(ValueError, match="the client is closed"):
        await client.models()
    with pytest.raises(ValueError, match="the client is closed"):
        client.stream("m", "p")
    with pytest.raises(ValueError, match="the client is closed"):
        await anext(client.stream_events("m", "p"))


def test_what_runs_when_the_client_is_closed_is_cancelled(server):
    begun, released = threading.Event(), threading.Event()
    server.answers["Generate"] = lambda request, context: begun.set() or released.wait(60)
    server.answers["GenerateStream"] = Endless()
    client = Client(server.address, timeout=60)
    stream = client.stream("m", "p")
    next(stream)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "m", "p")
        assert begun.wait(60)

        client.close()

        with pytest.raises(Cancelled):
            call.result()
        with pytest.raises(Cancelled):
            list(stream)
    released.set()


async def test_what_runs_when_the_async_client_is_closed_is_cancelled(server):
    begun, released = threading.Event(), threading.Event()
    server.answers["Generate"] = lambda request, context: begun.set() or released.wait(60)
    server.answers["GenerateStream"] = Endless(pause=60.0)
    client = AsyncClient(server.address, timeout=60)
    stream = client.stream("m", "p")
    events = client.stream_events("m", "p")
    await anext(stream)
    await anext(events)
    calls = [
        asyncio.ensure_future(one)
        for one in (client.generate("m", "p"), anext(stream), anext(events))
    ]
    assert await asyncio.to_thread(begun.wait, 60)

    await client.close()

    for call in calls:
        with pytest.raises(Cancelled, match="the client was closed"):
            await call
    released.set()


async def test_closing_an_async_stream_ends_its_reader(server):
    server.answers["GenerateStream"] = Endless(pause=60.0)
    async with AsyncClient(server.address, timeout=60) as client:
        stream = client.stream("m", "p")
        await anext(stream)

        async def rest() -> list[str]:
            return [piece async for piece in stream]

        reader = asyncio.create_task(rest())
        await asyncio.sleep(0)  # it reads
        await stream.aclose()

        assert await reader == []


def test_many_prompts_are_one_call(server, client):
    def echo(request, context):
        answer = one_sequence()
        answer.ClearField("results")
        for one in request.inputs:
            answer.results.append(
                generation_service_pb2.Result(
                    sequences=[
                        generation_service_pb2.Sequence(text=f"{one.text}!", finish_reason=1)
                    ]
                )
            )
        return answer

    server.answers["Generate"] = echo

    found = client.generate_many("m", ["a", "b", [5, 6]], beam=2, target_prefix="x")

    (request,) = server.requests
    assert found.texts == ("a!", "b!", "!")
    assert found.results[1].finish_reason == "eos"
    assert found.usage.output_tokens == 2
    assert [list(one.tokens.ids) for one in request.inputs] == [[], [], [5, 6]]
    assert {one.prefix_text for one in request.inputs} == {"x"}


async def test_many_prompts_are_one_call_of_the_async_client(server):
    server.answers["Generate"] = lambda request, context: one_sequence()

    async with AsyncClient(server.address, timeout=60) as client:
        assert (await client.generate_many("m", ["a"])).texts == ("2031-10-14",)
        with pytest.raises(BrokenStream, match="1 results came back for 2 inputs"):
            await client.generate_many("m", ["a", "b"])


def test_one_text_is_no_list_of_prompts(client):
    with pytest.raises(TypeError, match="is one text; give a list"):
        client.generate_many("m", "abc")


def test_a_token_goes_with_every_call(server):
    server.answers["Generate"] = lambda request, context: one_sequence()

    with Client(server.address, timeout=60, token="tw_1", metadata=[("x-mine", "1")]) as client:
        client.generate("m", "x")
        client.models()

    assert [metadata["authorization"] for metadata in server.metadata] == ["Bearer tw_1"] * 2
    assert [metadata["x-mine"] for metadata in server.metadata] == ["1"] * 2


@pytest.mark.parametrize("token", ["", "two words", "tö", "line\n"])
def test_a_token_that_no_header_carries_is_refused(token):
    with pytest.raises(ValueError, match="a token is printable ASCII"):
        Client("127.0.0.1:1", token=token)
