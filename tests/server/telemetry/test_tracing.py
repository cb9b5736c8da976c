"""Spans of a call, through a real gateway and worker."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine.errors import EngineFailure
from server.gateway.book import CallRecord, add_spans
from server.settings import Tracing as TracingSettings
from server.telemetry.tracing import Tracing, make_tracing
from server.wire.work_pb2 import Part, Record
from tests.fakes.calls import generate
from tests.fakes.engines import FakeGenerator
from tests.fakes.gateways import running_cell

TRACE, CLIENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


async def _spans_of(
    text: str, *, flags: str = "01", sample_ratio: float = 1.0
) -> dict[str, ReadableSpan]:
    """Ask a worker behind a gateway; return the spans of both by name."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, {"service.name": "tokenweir"}, sample_ratio)
    metadata = (("traceparent", f"00-{TRACE:032x}-{CLIENT:016x}-{flags}"),) if flags else ()
    engine = FakeGenerator()
    engine.error = EngineFailure("a step failed")  # raised if a prompt asks for it
    async with running_cell(engine, tracing=tracing) as cell:
        with suppress(grpc.RpcError):
            await cell.stubs.generation.Generate(
                generate(text, request_id="r-1"), metadata=metadata
            )
    await asyncio.to_thread(tracing.close)
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_worker_is_within_gateway_and_the_parts_follow_each_other() -> None:
    spans = await _spans_of("a b")

    gateway = spans.pop("tokenweir.v1.GenerationService/Generate")
    worker = spans.pop("Generate dates")
    assert gateway.parent is not None and worker.parent is not None
    assert (gateway.parent.trace_id, gateway.parent.span_id) == (TRACE, CLIENT)
    assert worker.parent.span_id == gateway.context.span_id
    assert {span.context.trace_id for span in (gateway, worker, *spans.values())} == {TRACE}
    assert [span.parent and span.parent.span_id for span in spans.values()] == [
        worker.context.span_id
    ] * 3
    seconds = {n: round((s.end_time - s.start_time) / 1e9, 6) for n, s in spans.items()}
    assert seconds == {"queue": 0.01, "prefill": 0.02, "decode": 0.03}
    assert spans["queue"].start_time == worker.start_time
    assert spans["prefill"].start_time == spans["queue"].end_time
    assert worker.attributes is not None
    assert worker.attributes["tokenweir.request_id"] == "r-1"
    assert worker.attributes["gen_ai.usage.output_tokens"] == 2


async def test_a_call_that_fails_is_marked_at_gateway_and_worker() -> None:
    spans = await _spans_of("FAIL")

    for name in ("tokenweir.v1.GenerationService/Generate", "Generate dates"):
        span = spans[name]
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["rpc.response.status_code"] == "INTERNAL"


async def test_a_call_without_a_trace_begins_one() -> None:
    spans = await _spans_of("a", flags="")

    assert spans["tokenweir.v1.GenerationService/Generate"].parent is None
    assert len({span.context.trace_id for span in spans.values()}) == 1


@pytest.mark.parametrize(
    ("flags", "ratio", "count"), [("00", 1.0, 0), ("", 0.0, 0), ("01", 0.0, 5)]
)
async def test_who_calls_decides_whether_a_call_is_traced_else_the_ratio(
    flags: str, ratio: float, count: int
) -> None:
    assert len(await _spans_of("a", flags=flags, sample_ratio=ratio)) == count


@pytest.mark.parametrize("slowest", ["queue", "prefill", "decode"])
def test_of_several_inputs_the_parts_are_those_of_the_slowest(slowest: str) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, {}, 1.0)
    told = Record(seconds=9.0)
    part = {"queue": 1.0, "prefill": 1.0, "decode": 1.0}
    # More of any two parts than the slowest, but not of all.
    others = {"queue": 1.5, "prefill": 1.5, "decode": 1.5} | {slowest: 0.0}
    told.parts.extend(Part(**times) for times in (part, part | {slowest: 3.0}, others))

    add_spans(tracing, CallRecord("Classify", "", "", 0.0, 109.0, "OK", told))
    tracing.close()

    seconds = {s.name: (s.end_time - s.start_time) / 1e9 for s in exporter.get_finished_spans()}
    assert seconds.pop("Classify") == 9.0
    assert seconds == {"queue": 1.0, "prefill": 1.0, "decode": 1.0} | {slowest: 3.0}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Something that speaks OTLP, and what it was sent."""
    sent: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                sent.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()
    thread.join()


def test_spans_reach_a_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    endpoint, sent = collector
    tracing = make_tracing(TracingSettings(endpoint=endpoint), "shop")
    assert tracing is not None

    tracing.span("Generate dates", "", 1.0).end()
    tracing.close()

    (resource,) = sent[0].resource_spans
    told = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (told["service.name"], told["tokenweir.role"]) == ("shop", "gateway")
    assert resource.scope_spans[0].spans[0].name == "Generate dates"


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    program = (
        "import sys; import server.gateway.gateway, server.gateway.book;"
        "import server.telemetry.tracing;"
        "from server.settings import Tracing;"
        "assert server.telemetry.tracing.make_tracing(Tracing(), 'a') is None;"
        "assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
