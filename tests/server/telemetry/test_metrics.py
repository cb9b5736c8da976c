"""Metrics, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineFailure
from engine.generation.async_engine import AsyncEngine
from server.config import GatewayConfig
from server.gateway.book import Book, CallRecord
from server.gateway.gateway import Gateway
from server.settings import Admin, Metrics, Settings, Tls
from server.telemetry import metrics_page, metrics_server
from server.telemetry.metrics import (
    GATEWAY_METRICS,
    METRICS,
    WORKER_METRICS,
    Counts,
    Sample,
    Snapshot,
    known_samples,
)
from server.telemetry.metrics_page import MetricsPage, Source, Sources
from server.wire.work_pb2 import Part, Record
from tests.conftest import Script, ScriptedRunner
from tests.fakes.calls import Stubs, failure_of, generate, stream, stubs_for, until
from tests.fakes.certificates import Authority
from tests.fakes.engines import FakeGenerator, FakePredictor, running_worker
from tests.fakes.gateways import running_cell

SERVER = Path(__file__).parents[3] / "server"
DASHBOARD = SERVER / "deploy" / "grafana-dashboard.json"


@dataclass
class Paged:
    """A gateway before a worker, and the page of both."""

    stubs: Stubs
    engine: FakeGenerator
    page: MetricsPage

    async def read(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return all samples by name and labels."""
        text = await asyncio.to_thread(_get, self.page.port)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels, whatever others they have."""
        wanted = labels.items()
        found = (await self.read()).items()
        return sum(value for (n, had), value in found if n == name and had >= set(wanted))


def _page(
    gateway: Source = list, workers: Sources = list, port: int = 0, **sections: Any
) -> MetricsPage:
    return MetricsPage(Settings(metrics=Metrics(port=port), **sections), [gateway], workers)


def _get(port: int, headers: Mapping[str, str] = MappingProxyType({})) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=dict(headers))
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@asynccontextmanager
async def served(config: GatewayConfig) -> AsyncIterator[Paged]:
    engine, predictor = FakeGenerator(), FakePredictor()
    async with running_cell((engine, predictor), config=config) as cell:

        def here() -> Snapshot:
            return [*cell.gateway.snapshot(), ("worker_restarts", (), 2)]

        page = _page(here, cell.gateway.worker_snapshots)
        try:
            yield Paged(cell.stubs, engine, page)
        finally:
            await asyncio.to_thread(page.close)


@pytest.fixture
async def cell() -> AsyncIterator[Paged]:
    async with served(GatewayConfig(max_concurrent_calls=2)) as cell:
        yield cell


async def test_an_answered_request_is_counted_by_its_model_and_worker(cell: Paged) -> None:
    decoding = pb.Decoding(sampling=pb.Sampling(), num_outputs=2)
    await cell.stubs.generation.Generate(generate("a b c", decoding=decoding))
    call = cell.stubs.generation.GenerateStream(stream("a STOP"))
    _ = [message async for message in call]

    async def of_dates(name: str) -> float:
        return await cell.value(f"tokenweir_{name}", model_name="dates")

    await until_true(lambda: of_dates("e2e_request_latency_seconds_count"), 2)
    assert await of_dates("prompt_tokens_total") == 5
    assert await of_dates("generation_tokens_total") == 5
    assert await of_dates("prefix_cache_queries_total") == 5
    assert await of_dates("time_to_first_token_seconds_count") == 2
    assert await of_dates("time_to_first_token_seconds_sum") == pytest.approx(0.06)
    assert await of_dates("request_queue_time_seconds_sum") == pytest.approx(0.02)
    stopped = await cell.value("tokenweir_request_success_total", finished_reason="stop")
    assert (stopped, await of_dates("request_success_total")) == (1, 3)
    assert await cell.value("tokenweir_time_to_first_token_seconds_bucket", le="0.025") == 0
    assert await cell.value("tokenweir_time_to_first_token_seconds_bucket", le="0.05") == 2


async def test_predictions_are_counted_without_times_of_tokens(cell: Paged) -> None:
    items = [prediction_service_pb2.Item(text="a b")]
    await cell.stubs.prediction.Label(
        prediction_service_pb2.LabelRequest(model="tags", items=items)
    )

    tags = {"model_name": "tags"}
    await until_true(lambda: cell.value("tokenweir_prompt_tokens_total", **tags), 5)
    assert await cell.value("tokenweir_request_prefill_time_seconds_count", **tags) == 1
    assert await cell.value("tokenweir_time_to_first_token_seconds_count", **tags) == 0


async def test_load_and_wasted_work_are_those_of_the_engine_now(cell: Paged) -> None:
    assert await cell.value("tokenweir_num_sequences_running", model_name="dates") == 3
    assert await cell.value("tokenweir_num_requests_waiting", model_name="dates") == 1
    assert await cell.value("tokenweir_kv_cache_usage_perc", model_name="dates") == 0.25
    assert await cell.value("tokenweir_wasted_tokens_total", kind="cancelled") == 2
    assert await cell.value("tokenweir_workers_serving") == 1
    assert await cell.value("tokenweir_worker_restarts_total") == 2


async def test_steps_and_the_times_between_tokens_are_those_of_a_real_engine(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
    spell: Callable[[str], Script],
) -> None:
    engine, _ = scripted_engine(spell("abcdef"), config=EngineConfig(max_num_seqs=2))
    gateway = Gateway(GatewayConfig())
    page = _page(workers=gateway.worker_snapshots)
    try:
        port = await gateway.start()
        async with (
            running_worker(engine) as (_, address),  # type: ignore[arg-type]
            stubs_for(f"127.0.0.1:{port}") as stubs,
        ):
            await gateway.pool.sync([address])
            cell = Paged(stubs, FakeGenerator(), page)
            ask = stubs.generation.Generate
            await asyncio.gather(*(ask(generate("a>", model="scripted")) for _ in range(3)))
            await until_true(lambda: cell.value(f"{_SECONDS_OF_ALL}_count"), 3)
            counts, found = set[float](), dict[str, float]()
            async with asyncio.timeout(60):
                while len(counts) != 1:  # a last step may come behind the answers
                    found = {name: await cell.value(f"tokenweir_{name}") for name in _OF_STEPS}
                    counts = {found["step_seconds_count"], found["step_batch_size_count"]}
                    counts |= {engine.step_times.steps}
    finally:
        await asyncio.to_thread(page.close)
        await gateway.close()

    assert min(counts) > 6
    assert found["step_batch_size_sum"] >= 3 * len("abcdef")
    assert found["inter_token_latency_seconds_count"] == 3 * len("abcdef")  # and the end of each
    assert 0 < found["inter_token_latency_seconds_sum"] <= 3 * found["step_seconds_sum"] + 1
    assert found["request_time_per_output_token_seconds_count"] == 3


_SECONDS_OF_ALL = "tokenweir_e2e_request_latency_seconds"
_OF_STEPS = (
    *("step_seconds_count", "step_seconds_sum", "step_batch_size_count", "step_batch_size_sum"),
    *("inter_token_latency_seconds_count", "inter_token_latency_seconds_sum"),
    "request_time_per_output_token_seconds_count",
)


def entered(told: Record, status: str) -> Snapshot:
    """Return what is counted of a call."""
    book = Book(lambda: ["w"])
    method = "/tokenweir.v1.GenerationService/Generate"
    book.enter(CallRecord(method, "w", "", 0.0, 0.0, status, told))
    book.flush()
    ((_, snapshot),) = book.snapshots()
    return snapshot


async def test_tokens_that_were_there_already_are_hits() -> None:
    told = Record(model="m", parts=[Part(input_tokens=8, cached_input_tokens=5)])

    found = {name: value for name, _, value in entered(told, "OK")}
    assert (found["prefix_cache_queries"], found["prefix_cache_hits"]) == (8, 5)


async def test_failures_and_refusals_are_counted_by_reason(cell: Paged) -> None:
    cell.engine.error = EngineFailure("a step failed")
    await failure_of(cell.stubs.generation.Generate(generate("FAIL")))
    held = [cell.stubs.generation.GenerateStream(stream("HOLD")) for _ in range(2)]
    await until(lambda: len(cell.engine.requests) == 3)
    await failure_of(cell.stubs.generation.Generate(generate("a")))
    for call in held:
        call.cancel()

    failures = "tokenweir_request_failures_total"
    await until_true(lambda: cell.value(failures, reason="CANCELLED"), 2)
    assert await cell.value(failures, reason="INTERNAL", model_name="dates") == 1
    assert await cell.value("tokenweir_gateway_refusals_total", reason="QUEUE_FULL") == 1
    requests = "tokenweir_gateway_requests_total"
    assert await cell.value(requests, method="Generate", code="INTERNAL") == 1
    await until_true(lambda: cell.value(requests, method="GenerateStream", code="CANCELLED"), 2)
    assert await cell.value("tokenweir_gateway_queue_seconds_count") == 3
    embed = prediction_service_pb2.EmbedRequest(model="dates")
    await failure_of(cell.stubs.prediction.Embed(embed))
    await until_true(
        lambda: cell.value(failures, reason="CAPABILITY_NOT_SUPPORTED", model_name="dates"), 1
    )
    await failure_of(cell.stubs.generation.Generate(generate("")))
    await until_true(lambda: cell.value(failures, reason="INVALID_FIELD"), 1)


async def test_a_name_that_a_client_makes_up_is_no_label(cell: Paged) -> None:
    await failure_of(cell.stubs.generation.Generate(generate("a", model="made up")))
    call = cell.stubs.channel.unary_unary("/tokenweir.v1.GenerationService/MadeUp")
    with pytest.raises(Exception, match="UNIMPLEMENTED"):
        await call(b"")

    text = await asyncio.to_thread(_get, cell.page.port)

    assert "made" not in text and "MadeUp" not in text


async def until_true(read: object, wanted: float) -> None:
    """Wait until a sample has a value: a call is counted after its client has the answer."""
    async with asyncio.timeout(60):
        while (found := await read()) != wanted:  # type: ignore[operator]
            assert found < wanted
            await asyncio.sleep(0.01)


async def test_names_and_units_are_those_of_prometheus(cell: Paged) -> None:
    text = await asyncio.to_thread(_get, cell.page.port)

    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS.values():
        family = families[metric.exported.removesuffix("_total")]
        assert (family.type, bool(family.documentation)) == (metric.kind, True)
        assert re.fullmatch("tokenweir_[a-z0-9_]+", metric.exported)
        assert "milli" not in metric.name and not metric.name.endswith("_total")
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_size"))
    assert "process_cpu_seconds" in families


@pytest.mark.parametrize(  # vllm/v1/metrics/loggers.py, without its prefix
    ("name", "kind"),
    [
        ("num_requests_waiting", "gauge"),
        ("kv_cache_usage_perc", "gauge"),
        ("prefix_cache_queries", "counter"),
        ("prefix_cache_hits", "counter"),
        ("prompt_tokens", "counter"),
        ("generation_tokens", "counter"),
        ("request_success", "counter"),
        ("time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "histogram"),
        ("request_time_per_output_token_seconds", "histogram"),
        ("e2e_request_latency_seconds", "histogram"),
        ("request_queue_time_seconds", "histogram"),
        ("request_prefill_time_seconds", "histogram"),
        ("request_decode_time_seconds", "histogram"),
    ],
)
def test_what_vllm_counts_too_is_called_as_there(name: str, kind: str) -> None:
    metric = METRICS[name]

    assert (metric.kind, metric.labels[0]) == (kind, "model_name")
    assert ("finished_reason" in metric.labels) == (name == "request_success")


async def test_where_operators_have_tokens_only_they_read_the_page(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"tw_ops").hexdigest()
    (tmp_path / "ops.toml").write_text(f'[[token]]\nsha256 = "{digest}"\ntenant = "ops"\n')
    page = _page(admin=Admin(port=0, tokens=tmp_path / "ops.toml"))
    try:
        none, other = {}, {"Authorization": "Bearer tw_other"}
        for header, said in ((none, b"asks for a token"), (other, b"not known here")):
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                await asyncio.to_thread(_get, page.port, header)
            assert refused.value.headers["WWW-Authenticate"] == "Bearer"
            assert said in refused.value.read()
            refused.value.close()
        found = await asyncio.to_thread(_get, page.port, {"Authorization": "Bearer tw_ops"})
    finally:
        await asyncio.to_thread(page.close)

    assert "process_cpu_seconds_total" in found


def test_other_machines_read_by_tls_whose_certificate_may_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "is_loopback", lambda host: False)
    before, after = Authority("before"), Authority("after")
    cert, key = before.certify().write(tmp_path)
    page = _page(tls=Tls(cert, key))
    url = f"https://localhost:{page.port}/metrics"

    def is_read(authority: Authority) -> bool:
        context = ssl.create_default_context(cadata=authority.pem.decode())
        try:
            with urllib.request.urlopen(url, timeout=60, context=context) as answer:
                return b"process_cpu_seconds_total" in answer.read()
        except urllib.error.URLError:
            return False

    try:
        with socket.create_connection(("127.0.0.1", page.port)):  # that says nothing
            assert is_read(before)
            after.certify().write(tmp_path)
            assert is_read(after)
            assert not is_read(before)
    finally:
        page.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_who_says_nothing_costs_little_and_not_for_long(
    is_encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "is_loopback", lambda host: not is_encrypted)
    monkeypatch.setattr(metrics_server, "_SECONDS", 0.5)
    cert, key = Authority("a").certify().write(tmp_path)
    page = _page(tls=Tls(cert, key))
    silent, started = [], time.monotonic()
    try:
        for _ in range(100):
            silent.append(socket.create_connection(("127.0.0.1", page.port), timeout=60))
        ends = [connection.recv(1) for connection in reversed(silent)]  # the first ones at last
        waited = time.monotonic() - started
    finally:
        for connection in silent:
            connection.close()
        page.close()

    assert ends == [b""] * 100
    assert 0.5 <= waited < 30


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/", 200, "process_cpu_seconds_total"),
        ("GET", "/metrics?of=all", 200, "process_cpu_seconds_total"),
        ("HEAD", "/metrics", 200, ""),
        ("GET", "/metrics/1", 404, "there is no '/metrics/1' here; metrics are at /metrics\n"),
        ("GET", "/v1/models", 404, "there is no '/v1/models' here; metrics are at /metrics\n"),
        ("POST", "/metrics", 405, "POST is not allowed; read metrics by GET\n"),
        ("DELETE", "/", 405, "DELETE is not allowed; read metrics by GET\n"),
    ],
)
def test_only_metrics_are_answered_on_their_port(
    method: str, path: str, status: int, said: str
) -> None:
    page = _page()
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
        page.close()

    assert answer.status == status
    assert text == said if status != 200 else said in text
    assert (answer.headers["Allow"] == "GET, HEAD") == (status == 405)


async def test_a_large_page_is_made_and_sent_beside_the_event_loop_of_streams() -> None:
    threads = set[int]()

    def many() -> list[tuple[str, Snapshot]]:
        threads.add(threading.get_ident())
        snapshot: Snapshot = [("prompt_tokens", (f"model {n}",), n) for n in range(100)]
        return [(f"10.0.0.{n}:50051", snapshot) for n in range(150)]

    page = _page(workers=many)
    try:
        text = await asyncio.to_thread(_get, page.port)
    finally:
        page.close()

    assert len(text) > 1 << 20
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="Address already in use.*--metrics-port"):
            _page(port=taken.getsockname()[1])


@pytest.mark.parametrize(
    "sample",
    [
        ("no_metric", (), 1),
        ("prompt_tokens", (), 1),
        ("prompt_tokens", ("m",), [1, 2]),
        ("step_seconds", ("m",), 1),
        ("step_seconds", ("m",), [1, 2]),
    ],
)
def test_samples_that_are_not_known_here_are_left_out(sample: Sample) -> None:
    known: Sample = ("prompt_tokens", ("m",), 1.0)

    assert known_samples([sample, known]) == [known]


async def test_a_call_that_was_never_understood_is_counted_too() -> None:
    told = Record(reason="INVALID_FIELD")

    assert entered(told, "INVALID_ARGUMENT") == [("request_failures", ("", "INVALID_FIELD"), 1)]


def test_counts_are_kept_by_their_labels() -> None:
    counts = Counts()
    counts.count("gateway_refusals", "QUEUE_FULL")
    counts.count("gateway_refusals", "QUEUE_FULL", by=2)
    counts.count("gateway_refusals", "DRAINING")

    assert counts.snapshot() == [
        ("gateway_refusals", ("QUEUE_FULL",), 3),
        ("gateway_refusals", ("DRAINING",), 1),
    ]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    used = set(re.findall(r"\btokenweir_\w+", DASHBOARD.read_text()))
    exported = set()
    for metric in METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        exported |= {metric.exported + suffix for suffix in suffixes}

    assert used - exported == set()
    assert len(used) > 15 and len(dashboard["panels"]) > 8


def test_every_label_of_the_dashboard_is_one_of_its_metric() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = {metric.exported: {*metric.labels} for metric in GATEWAY_METRICS}
    known |= {metric.exported: {*metric.labels, "worker"} for metric in WORKER_METRICS}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in asked:
        grouped = re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression)))
        used = {*grouped, *re.findall(r'(\w+)=~?"', expression)} - {"le"}
        for name in re.findall(r"tokenweir_\w+", expression):
            assert used <= known[re.sub("_(bucket|sum|count)$", "", name)], expression
    for variable in dashboard["templating"]["list"]:
        for name, label in re.findall(r"label_values\((\w+), (\w+)\)", json.dumps(variable)):
            assert label in known[name]
    assert len(asked) > 25
