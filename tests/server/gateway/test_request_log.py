"""The line that every request has in the log, over real gRPC on engines that obey the test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2

from engine.errors import EngineFailure, QueueFull
from server.calls.call_server import ServerCall
from server.calls.status import call_status
from server.config import GatewayConfig
from server.gateway.book import Book, CallRecord
from server.gateway.gateway import Gateway
from server.gateway.request_head import RequestHead
from server.settings import Auth
from server.telemetry.logs import (
    RECORDS_AT_ONCE,
    RECORDS_PER_SECOND,
    REQUESTS,
    LogBudget,
    fields_of,
)
from server.telemetry.tracing import trace_id_in, traceparent_in
from server.wire.work_pb2 import Part, Record
from tests.fakes.calls import Stubs, failure_of, generate, stream, stubs_for, until
from tests.fakes.clock import FakeClock
from tests.fakes.engines import OPTIONS, FakeGenerator, FakePredictor, running_worker
from tests.fakes.gateways import entry, num_running, num_waiting, running_cell, running_gateway
from tests.fakes.http_calls import http_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Lines:
    """The lines of requests so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "server")
        self._caplog = caplog

    def all(self) -> list[dict[str, Any]]:
        found = [record for record in self._caplog.records if record.name == REQUESTS]
        return [dict(fields_of(record)) for record in found]

    async def only(self) -> dict[str, Any]:
        await until(lambda: bool(self.all()))
        (line,) = self.all()
        return line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


@pytest.fixture
async def engine() -> FakeGenerator:
    engine = FakeGenerator()
    engine.capabilities = (*engine.capabilities, *OPTIONS)
    return engine


@pytest.fixture
async def stubs(engine: FakeGenerator) -> AsyncIterator[Stubs]:
    async with running_cell((engine, FakePredictor())) as cell:
        yield cell.stubs


async def test_an_answered_request_has_one_line_with_all_there_is_to_say(
    stubs: Stubs, lines: Lines
) -> None:
    scheduling = pb.Scheduling(tenant="shop")
    decoding = pb.Decoding(sampling=pb.Sampling(), num_outputs=2)

    await stubs.generation.Generate(
        generate("a b", "c STOP", request_id="r-1", scheduling=scheduling, decoding=decoding),
        metadata=(("traceparent", TRACEPARENT),),
    )

    line = await lines.only()
    assert line.pop("seconds") > 0
    assert 0 <= line.pop("gateway_queue") < 60
    assert line.pop("worker").startswith("127.0.0.1:")
    assert line == {
        "request_id": "r-1",
        "method": "Generate",
        "model": "dates",
        "tenant": "shop",
        "input_tokens": 4,
        "output_tokens": 4,
        "queue": 0.01,
        "ttft": 0.03,
        "finish": "eos,stop",
        "status": "OK",
        "trace_id": TRACE,
    }


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (TRACEPARENT, TRACE),
        (f"{TRACEPARENT}-more", ""),  # version 00 has no more
        (f"01{TRACEPARENT[2:]}", TRACE),
        (f"01{TRACEPARENT[2:]}-more", TRACE),
        (f"01{TRACEPARENT[2:]}more", ""),
        (f"ff{TRACEPARENT[2:]}", ""),
        (TRACEPARENT.upper(), ""),
        (TRACEPARENT.replace(TRACE, "0" * 32), ""),
        (TRACEPARENT.replace("b7ad6b7169203331", "0" * 16), ""),
        (TRACEPARENT[:-1], ""),
        ("", ""),
    ],
)
def test_a_trace_is_read_as_w3c_has_it(traceparent: str, trace_id: str) -> None:
    found = traceparent_in([("other", TRACEPARENT), ("traceparent", traceparent)])

    assert trace_id_in(found) == trace_id


async def test_a_stream_has_a_line_with_the_time_of_its_tokens(stubs: Stubs, lines: Lines) -> None:
    call = stubs.generation.GenerateStream(stream("SLOW b c STOP", request_id="r-2"))
    _ = [message async for message in call]

    line = await lines.only()
    assert (line["request_id"], line["method"]) == ("r-2", "GenerateStream")
    assert (line["output_tokens"], line["finish"], line["tpot"]) == (4, "stop", 0.01)


def test_of_several_inputs_the_longest_times_are_told() -> None:
    parts = [
        Part(
            output_tokens=3,
            num_sequences=1,
            queue=seconds,
            decode=2 * seconds,
            time_to_first_token=seconds + 0.1,
        )
        for seconds in (0.1, 0.3, 0.2)
    ]

    fields = CallRecord("Generate", "", "", 0.0, 0.0, "OK", Record(parts=parts)).fields()

    assert (fields["queue"], fields["ttft"], fields["tpot"]) == (0.3, 0.4, 0.3)


async def test_a_line_tells_how_long_the_gateway_has_had_its_request(
    engine: FakeGenerator, lines: Lines
) -> None:
    async with running_worker(engine, FakePredictor()) as (_, address):
        gateway = Gateway(GatewayConfig(max_calls_per_worker=1))
        asked = f"127.0.0.1:{await gateway.start()}"
        await gateway.pool.sync([address])
        await until(lambda: gateway.pool.num_serving == 1)
        async with stubs_for(asked) as stubs:
            held = stubs.generation.GenerateStream(stream("HOLD STOP", request_id="r-8"))
            await engine.seen.wait()
            waiting = stubs.generation.Generate(generate("a", request_id="r-9"))
            await until(lambda: num_waiting(gateway) == 1)
            since = time.monotonic()
            await asyncio.sleep(0.05)
            waited = time.monotonic() - since
            engine.release.set()
            _ = [message async for message in held], await waiting
            await until(lambda: len(lines.all()) == 2)
        await gateway.close()

    told = {line["request_id"]: line.get("gateway_queue") for line in lines.all()}
    assert told["r-9"] >= waited


async def test_scores_and_predictions_have_lines(stubs: Stubs, lines: Lines) -> None:
    inputs = [pb.Input(text="a b", prefix_text="c")]
    await stubs.generation.Score(pb.ScoreRequest(model="dates", inputs=inputs))
    items = [prediction_service_pb2.Item(text="a b")]
    await stubs.prediction.Label(prediction_service_pb2.LabelRequest(model="tags", items=items))

    await until(lambda: len(lines.all()) == 2)
    said = [(x["method"], x["model"], x["input_tokens"], x["queue"]) for x in lines.all()]
    assert said == [("Score", "dates", 1, 0.01), ("Label", "tags", 5, 0.01)]


async def test_a_request_that_fails_has_a_line_with_its_reason(
    stubs: Stubs, engine: FakeGenerator, lines: Lines
) -> None:
    engine.error = EngineFailure("a step failed")

    await failure_of(stubs.generation.Generate(generate("FAIL", request_id="r-3")))

    line = await lines.only()
    assert (line["status"], line["reason"], line["error"]) == (
        "INTERNAL",
        "INTERNAL",
        "a step failed",
    )


async def test_a_bug_has_its_traceback_under_the_id_of_its_request(
    stubs: Stubs, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    await failure_of(stubs.generation.Generate(generate("CRASH", request_id="r-4")))

    line = await lines.only()
    assert (line["status"], line["error"]) == ("INTERNAL", "ZeroDivisionError")
    (bug,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert fields_of(bug) == {"request_id": "r-4"}
    assert bug.exc_info is not None


async def test_a_cancelled_call_has_a_line(
    stubs: Stubs, engine: FakeGenerator, lines: Lines
) -> None:
    call = stubs.generation.GenerateStream(stream("HOLD", request_id="r-5"))
    await until(lambda: bool(engine.requests))

    call.cancel()

    line = await lines.only()
    assert (line["request_id"], line["status"]) == ("r-5", "CANCELLED")


async def test_a_call_without_an_id_has_the_same_one_at_gateway_and_worker(
    stubs: Stubs, engine: FakeGenerator, lines: Lines
) -> None:
    call = stubs.generation.GenerateStream(stream("HOLD"))
    await until(lambda: bool(engine.requests))

    call.cancel()

    line = await lines.only()
    assert line["status"] == "CANCELLED"
    assert line["request_id"] in engine.requests[0].request_id


async def test_what_the_gateway_refuses_has_a_line_too(lines: Lines) -> None:
    async with running_gateway(config=GatewayConfig(worker_wait=0.05)) as (_, stubs):
        request = generate("a", request_id="r-6", scheduling=pb.Scheduling(tenant="shop"))
        trace = (("traceparent", TRACEPARENT),)
        await failure_of(stubs.generation.Generate(request, metadata=trace))

    line = await lines.only()
    error = line.pop("error")
    assert "no worker" in error
    assert line == {
        "request_id": "r-6",
        "method": "Generate",
        "model": "dates",
        "tenant": "shop",
        "status": "UNAVAILABLE",
        "reason": "STARTING",
        "trace_id": TRACE,
    }


async def test_an_answer_by_http_has_the_id_of_the_line_of_a_call_that_nobody_reads(
    lines: Lines, tmp_path: Path
) -> None:
    (tokens := tmp_path / "tokens.toml").write_text(entry("tw_a", tenant="a"))
    async with running_gateway(config=GatewayConfig(auth=Auth(tokens=tokens))) as (_, stubs):
        async with http_server(stubs.address) as caller:
            body, said = {"model": "dates", "prompt": "a"}, {"x-request-id": "mine"}
            place = f"{caller.url}/v1/completions"
            async with caller.session.post(place, json=body, headers=said) as found:
                assert found.status == 401

    assert found.headers["x-request-id"] == (await lines.only())["request_id"]


async def test_what_is_given_up_before_a_worker_has_it_has_a_line_too(lines: Lines) -> None:
    async with running_gateway() as (gateway, stubs):
        call = stubs.generation.Generate(generate("a", request_id="r-7"))
        await until(lambda: num_running(gateway) == 1)
        call.cancel()
        line = await lines.only()

    assert (line["request_id"], line["model"], line["status"]) == ("r-7", "dates", "CANCELLED")


def test_refusals_by_the_thousand_are_counted(
    caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    caplog.set_level(logging.INFO, "server")
    book = Book(list, clock=clock)
    error = QueueFull("full", 1.0)
    status = call_status(error, "r")
    call = cast(ServerCall, SimpleNamespace(method="/x/Generate", invocation_metadata=tuple))

    for _ in range(RECORDS_AT_ONCE + 5000):
        book.refused(call, "r", RequestHead(), status, error.reason)
    clock.now += 1.01 / RECORDS_PER_SECOND
    book.refused(call, "r", RequestHead(), status, error.reason)

    told = ["request"] * RECORDS_AT_ONCE + ["(5,000 lines like the next are left out)", "request"]
    assert caplog.messages == told
    assert book.counts.snapshot() == [("gateway_refusals", ("QUEUE_FULL",), 5101)]


def test_a_long_pause_saves_no_more_lines_than_may_be_at_once(clock: FakeClock) -> None:
    budget = LogBudget(clock)
    clock.now += 3600

    assert sum(budget.take() for _ in range(2 * RECORDS_AT_ONCE)) == RECORDS_AT_ONCE
