"""Tables, JSON and pictures of load tests."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from PIL import Image
from pydantic import TypeAdapter
from rich.console import Console

from loadtest.errors import LoadTestError
from loadtest.metrics import RequestRecord, summarize
from loadtest.plots import write_png
from loadtest.report import print_table, write_json
from loadtest.runner import LoadReport
from loadtest.workload import LoadConfig


def report_of(*records: RequestRecord, method: str = "generate") -> LoadReport:
    return LoadReport(
        config=LoadConfig(
            "127.0.0.1:1", "dates", ("p", "ü"), len(records), rate=2.5, options={"top_k": 3}
        ),
        method=method,
        started_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        versions={"tokenweir": "0.1.0"},
        summary=summarize(records),
        records=records,
    )


def good(index: int) -> RequestRecord:
    start = index * 0.4
    return RequestRecord(
        index,
        prompt=0,
        scheduled=start,
        sent=start + 0.001,
        finished=start + 0.2 + index / 100,
        status="OK",
        token_times=(start + 0.1, start + 0.15 + index / 100),
        first_tokens=1,
        input_tokens=3,
        output_tokens=2,
        finish_reason="eos",
        server_queue=0.002,
        server_first_token=0.002,
        server_batch_size=1.5,
    )


def refused(index: int) -> RequestRecord:
    return RequestRecord(
        index,
        prompt=0,
        scheduled=index * 0.4,
        sent=index * 0.4,
        finished=index * 0.4 + 0.01,
        status="UNAVAILABLE",
        reason="DRAINING",
        message="the server [ipv4:127.0.0.1] drains",
    )


MIXED = report_of(*(good(index) for index in range(5)), refused(5))
FAILED = report_of(refused(0), refused(1))
ONE_PASS = report_of(
    *(
        replace(good(index), token_times=(), server_queue=None, server_first_token=None)
        for index in range(3)
    ),
    method="classify",
)


def table_text(report: LoadReport, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(report, console)
    return console.file.getvalue()


def test_table_has_throughput_latencies_and_errors():
    text = table_text(MIXED)

    assert "Load test of dates: open loop, 2.5 requests/s, poisson arrivals" in text
    assert "5 of 6" in text
    for name in ("first token (TTFT)", "inter-token (ITL)", "per token (TPOT)", "end to end"):
        assert name in text
    assert "UNAVAILABLE DRAINING" in text
    assert "the server [ipv4:127.0.0.1] drains" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("width", "num_tables"), [(80, 1), (60, 2), (40, 4)])
def test_latencies_of_a_minute_fit_into_a_narrow_terminal(width: int, num_tables: int):
    slow = replace(good(0), finished=59.25, token_times=(0.5, 12.5, 59.25))

    text = table_text(report_of(slow, slow), width)

    assert "59250" in text
    assert "…" not in text
    assert text.count("end to end") == num_tables
    assert all(name in text for name in ("mean", "p50", "p90", "p95", "p99", "max", "count"))
    assert max(map(len, text.splitlines())) <= width


def test_table_says_so_when_every_request_failed():
    text = table_text(FAILED)

    assert "0 of 2" in text
    assert "no request was answered" in text
    assert "first token" not in text


def test_table_of_a_one_pass_model_has_no_token_times():
    text = table_text(ONE_PASS)

    assert "end to end" in text
    assert "first token" not in text and "output tokens" not in text


@pytest.mark.parametrize("report", [MIXED, FAILED, ONE_PASS])
def test_report_survives_json(report: LoadReport, tmp_path: Path):
    write_json(report, tmp_path / "report.json")

    written = (tmp_path / "report.json").read_bytes()
    assert TypeAdapter(LoadReport).validate_json(written) == report
    assert os.listdir(tmp_path) == ["report.json"]


def test_report_that_cannot_be_written_leaves_nothing(tmp_path: Path):
    (tmp_path / "report.json").mkdir()

    with pytest.raises(LoadTestError, match="cannot write .*report.json: Is a directory"):
        write_json(MIXED, tmp_path / "report.json")
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("report", [MIXED, FAILED, ONE_PASS, report_of(good(0))])
def test_picture_is_made(report: LoadReport, tmp_path: Path):
    write_png(report, tmp_path / "latency.png")

    with Image.open(tmp_path / "latency.png") as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 900
        assert len(image.convert("RGB").getcolors(2**20)) > 20  # something is drawn
    assert os.listdir(tmp_path) == ["latency.png"]
