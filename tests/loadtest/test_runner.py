"""Load tests against a scripted gRPC server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from tokenweir.v1 import admin_service_pb2, common_pb2, prediction_service_pb2

from loadtest.errors import LoadTestError
from loadtest.report import notes
from loadtest.runner import run
from loadtest.workload import LoadConfig, arrival_times
from tests.server.scripted_server import (
    ScriptedServer,
    fail,
    list_models,
    scripted_server,
    stream_messages,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
        yield running


def open_loop(server: ScriptedServer, num_requests: int, rate: float) -> LoadConfig:
    return LoadConfig(
        server.address, "m", ("p", "q"), num_requests, rate=rate, arrival="constant", timeout=10
    )


def closed_loop(server: ScriptedServer, num_requests: int, concurrency: int) -> LoadConfig:
    return LoadConfig(
        server.address, "m", ("p", "q"), num_requests, concurrency=concurrency, timeout=10
    )


def test_records_hold_what_the_stream_brought(server):
    report = run(closed_loop(server, num_requests=3, concurrency=1))

    assert [record.index for record in report.records] == [0, 1, 2]
    assert [record.prompt for record in report.records] == [0, 1, 0]
    record = report.records[1]
    assert (record.status, record.finish_reason) == ("OK", "eos")
    assert (record.input_tokens, record.output_tokens, record.first_tokens) == (4, 2, 1)
    assert record.scheduled <= record.sent < record.token_times[0] <= record.token_times[1]
    assert record.token_times[1] <= record.finished
    assert (record.server_queue, record.server_batch_size) == (0.003, 2.0)
    assert report.method == "generate"
    assert report.summary.output_tokens == 6


def test_one_request_before_the_test_is_not_measured(server):
    run(closed_loop(server, num_requests=3, concurrency=1))

    assert sum(hasattr(request, "request") for request in server.requests) == 4


def test_open_loop_counts_latency_from_the_scheduled_time_while_the_server_stalls(server):
    """One call at a time, and the first takes half a second: later ones wait, and say so."""
    one_at_a_time = threading.Lock()
    served: list[float] = []

    def stalling(request, context):
        with one_at_a_time:
            served.append(time.monotonic())
            if len(served) == 2:  # the first after the warm-up
                time.sleep(0.5)
            yield from stream_messages(["a"])

    server.answers["GenerateStream"] = stalling

    open_report = run(open_loop(server, num_requests=10, rate=50))
    served.clear()
    closed_report = run(closed_loop(server, num_requests=10, concurrency=1))

    for record in open_report.records:  # due every 20 ms, all answered at about 0.5 s
        assert record.end_to_end >= 0.5 - record.scheduled
    assert open_report.summary.max_in_flight == 10
    hidden = closed_report.summary.end_to_end.p50  # of the same stall
    assert hidden < open_report.summary.end_to_end.p50 / 2


def test_open_loop_sends_on_time_however_many_are_running(server):
    def slow(request, context):
        time.sleep(0.5)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = slow
    config = open_loop(server, num_requests=15, rate=100)

    report = run(config)

    assert [record.scheduled for record in report.records] == arrival_times(config)
    assert report.summary.send_delay.p50 < 0.2
    assert report.summary.max_in_flight == 15


def test_closed_loop_never_exceeds_its_concurrency(server):
    running = 0
    most = 0
    lock = threading.Lock()

    def counted(request, context):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = counted

    report = run(closed_loop(server, num_requests=20, concurrency=4))

    assert most == 4
    assert report.summary.max_in_flight == 4
    assert report.summary.num_ok == 20


def test_errors_are_counted_by_status_and_reason_and_not_retried(server):
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="tokenweir")
    numbers = iter(range(100))

    def mixed(request, context):
        number = next(numbers)
        if number % 3 == 1:
            fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info)
        if number % 3 == 2:
            fail(context, grpc.StatusCode.INTERNAL, "broken")
        return stream_messages(["a"])

    server.answers["GenerateStream"] = mixed

    report = run(closed_loop(server, num_requests=9, concurrency=1))

    assert report.summary.num_ok == 3
    assert report.summary.errors == {"RESOURCE_EXHAUSTED QUEUE_FULL": 3, "INTERNAL": 3}
    assert {record.message for record in report.records} == {"", "full", "broken"}
    assert report.summary.end_to_end.count == 3


def test_request_past_its_deadline_is_an_error(server):
    released = threading.Event()

    def late(request, context):
        released.wait(0.5)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = late
    config = replace(closed_loop(server, num_requests=2, concurrency=2), timeout=0.1)

    report = run(config)
    released.set()

    assert report.summary.errors == {"DEADLINE_EXCEEDED": 2}


def test_requests_that_are_given_no_time_expire_at_a_server_that_answers(server):
    def late(answer):
        def give(request, context):
            time.sleep(0.2)
            return answer(request, context)

        return give

    server.answers["ListModels"] = late(list_models("m"))
    server.answers["GenerateStream"] = late(lambda request, context: stream_messages(["a"]))
    config = replace(closed_loop(server, num_requests=2, concurrency=2), timeout=0.05)

    report = run(config)

    assert report.summary.errors == {"DEADLINE_EXCEEDED": 2}


def test_stream_without_its_summary_is_an_error(server):
    server.answers["GenerateStream"] = lambda request, context: list(stream_messages(["a"]))[:-1]

    report = run(closed_loop(server, num_requests=2, concurrency=1))

    assert report.summary.errors == {"DATA_LOSS BROKEN_STREAM": 2}


def test_options_reach_the_requests(server):
    config = replace(
        closed_loop(server, num_requests=1, concurrency=1), options={"max_new_tokens": 5}
    )

    run(config)

    assert server.requests[-1].request.stopping.max_new_tokens == 5


def test_tokens_that_the_server_had_kept_are_counted(server):
    def cached(request, context):
        *others, summary = stream_messages(["a"])
        summary.summary.usage.cached_input_tokens = 3
        yield from (*others, summary)

    server.answers["GenerateStream"] = cached

    report = run(closed_loop(server, num_requests=4, concurrency=1))

    assert report.summary.cached_input_tokens == 12
    assert "they repeat, and 12 of 16 input tokens came from what the server had kept" in (
        " ".join(notes(report))
    )


def test_the_load_test_says_how_busy_it_was_itself(server):
    """A stalling progress display is the event loop's own fault, and no server's."""
    config = closed_loop(server, num_requests=3, concurrency=1)

    stalled = run(config, lambda done, total: time.sleep(0.2))

    assert stalled.own.loop_delay.max > 0.1
    assert stalled.own.is_limit
    assert "the load test itself was the limit" in " ".join(notes(stalled))


def test_unknown_option_is_refused(server):
    config = replace(closed_loop(server, num_requests=1, concurrency=1), options={"beams": 5})

    with pytest.raises(LoadTestError, match="unknown option beams; known are"):
        run(config)


def test_progress_is_told_after_every_request(server):
    told: list[tuple[int, int]] = []

    run(closed_loop(server, num_requests=3, concurrency=2), lambda *counts: told.append(counts))

    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_nobody_at_the_address_is_said_clearly():
    config = LoadConfig("127.0.0.1:1", "m", ("p",), 1, concurrency=1, timeout=5)

    with pytest.raises(LoadTestError, match="no server answers at 127.0.0.1:1; start one"):
        run(config)


def test_model_that_is_not_served_is_said_clearly(server):
    server.answers["ListModels"] = list_models("dates", "tagging")

    with pytest.raises(LoadTestError, match="has no model 'm'; it has: dates, tagging"):
        run(closed_loop(server, num_requests=1, concurrency=1))


def test_one_pass_model_is_measured_from_end_to_end(server):
    server.answers["ListModels"] = list_models("m", capabilities=["label", "embed"])
    server.answers["Label"] = lambda request, context: prediction_service_pb2.LabelResponse(
        results=[prediction_service_pb2.LabelResponse.Spans()],
        usage=common_pb2.Usage(input_tokens=6),
    )

    report = run(closed_loop(server, num_requests=4, concurrency=2))

    assert report.method == "label"
    assert report.summary.num_ok == 4
    assert report.summary.input_tokens == 24
    assert report.summary.end_to_end.count == 4
    assert report.summary.time_to_first_token is None


def test_prompts_of_an_image_model_are_files(server, tmp_path: Path):
    model = admin_service_pb2.ModelInfo(
        model="m", architecture="vision-encoder", capabilities=["classify"]
    )
    server.answers["ListModels"] = lambda request, context: admin_service_pb2.ListModelsResponse(
        models=[model]
    )
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )
    (tmp_path / "a.png").write_bytes(b"png")
    config = replace(
        closed_loop(server, num_requests=1, concurrency=1), prompts=(str(tmp_path / "a.png"),)
    )

    assert run(config).summary.num_ok == 1
    assert server.requests[-1].items[0].image == b"png"
    with pytest.raises(LoadTestError, match="prompts are paths of image files"):
        run(replace(config, prompts=("no such file",)))
