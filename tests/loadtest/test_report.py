"""Tables, JSON and pictures of load tests."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from pydantic import TypeAdapter
from rich.console import Console

from loadtest.answers import Checks, WrongAnswer
from loadtest.arrival.arrival import ClosedLoop, OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.goals import goodput, outcomes, parse_slo
from loadtest.load_report import LoadReport
from loadtest.metrics import RequestRecord, summarize, window_of
from loadtest.reports.charts import draw_series
from loadtest.reports.csv_file import write_requests, write_trials
from loadtest.reports.html_file import write_html, write_series_html
from loadtest.reports.live import Figures, shown, table
from loadtest.reports.plots import write_png
from loadtest.reports.report import print_series, print_table, write_json, write_series_json
from loadtest.series import Series, SeriesReport
from loadtest.target.target import ServerSample


def report_of(*records: RequestRecord, method: str = "generate", **more: Any) -> LoadReport:
    return LoadReport(
        config=LoadConfig(
            "127.0.0.1:1",
            "dates",
            OpenLoop(Rates((2.5,))),
            max(1, len(records)),
            slo=parse_slo("ttft=150ms,e2e=1s"),
        ),
        work="2 prompts in turn",
        num_different=2,
        method=method,
        started_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        versions={"tokenweir": "0.1.0"},
        window=window_of(records),
        summary=summarize(records),
        records=records,
        **more,
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
        replace(
            good(index),
            token_times=(),
            output_tokens=0,
            server_queue=None,
            server_first_token=None,
        )
        for index in range(3)
    ),
    method="classify",
)


GOOD = tuple(good(index) for index in range(5))
RICH = report_of(
    *(replace(record, kind="beam" if record.index % 2 else "<short>") for record in GOOD),
    refused(5),
    kinds={"beam": summarize(GOOD[1::2]), "<short>": summarize(GOOD[::2])},
    goodput=goodput(GOOD, window_of(GOOD), parse_slo("ttft=150ms")),
    goals=outcomes(GOOD, window_of(GOOD), parse_slo("ttft=50ms,e2e=1s")),
    checks=Checks(5, 1, 2, 0, 0, (WrongAnswer(3, "text", "'a'", "'<b>'"),)),
    server=tuple(ServerSample(at / 2, at, 1, 0.5, 100.0, at * 7) for at in range(5)),
    interrupted=True,
)


def series() -> SeriesReport:
    config = replace(MIXED.config, duration=2.0, num_requests=None)
    return Series(config, lambda one: replace(RICH, interrupted=False, config=one)).sweep(
        (10.0, 20.0)
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


def test_table_has_kinds_goals_and_wrong_answers():
    text = " ".join(table_text(RICH).split())

    assert "beam" in text and "<short>" in text
    assert "p99 of ttft is 100.0 ms, bound 50 ms" in text
    assert "goodput" in text and "100.0% of all" in text
    assert "4 of 5" in text
    assert "request 3: text is '<b>', not 'a'" in text


@pytest.mark.parametrize("report", [FAILED, ONE_PASS, report_of()])
def test_a_page_needs_nothing_else_and_has_all_it_should(report: LoadReport, tmp_path: Path):
    write_html(report, tmp_path / "run.html")

    page = (tmp_path / "run.html").read_text()
    sources = re.findall(r"(?:src|href)=[\"']([^\"']{1,30})", page)
    assert len(sources) >= 4 and all(one.startswith("data:image/svg+xml;base64") for one in sources)
    assert "<script" not in page
    for word in ("Settings", "open loop, 2.5 requests/s", "0.1.0", "2 prompts in turn"):
        assert word in page
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_page_shows_what_is_not_well_and_no_markup_of_an_answer(tmp_path: Path):
    write_html(RICH, tmp_path / "run.html")

    page = (tmp_path / "run.html").read_text()
    assert "1 of 6 requests failed" in page
    assert "threshold missed: p99 of ttft" in page
    assert "&lt;b&gt;" in page and "<b>" not in page and "<short>" not in page
    assert page.count("<img") == 8  # three latencies, four courses, the whole course


def test_a_page_says_above_all_that_the_load_test_was_late(tmp_path: Path):
    late = replace(report_of(good(0)), invalid=("the load test itself was the limit",))

    write_html(late, tmp_path / "run.html")

    page = (tmp_path / "run.html").read_text()
    assert '<div class="problems"><ul><li>the load test itself' in page


def test_rows_of_requests_say_which_count(tmp_path: Path):
    report = replace(MIXED, window=window_of(MIXED.records, warmup=0.5))

    write_requests(report, tmp_path / "run.csv")

    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [row["counts"] for row in rows] == ["0", "0", "1", "1", "1", "1"]
    assert (rows[0]["status"], rows[5]["reason"]) == ("OK", "DRAINING")
    assert float(rows[0]["ttft"]) == pytest.approx(0.1) and rows[5]["ttft"] == ""


def test_a_series_is_written_and_printed(tmp_path: Path):
    report = series()
    write_series_json(report, tmp_path / "s.json")
    write_series_html(report, tmp_path / "s.html")
    write_trials(report, tmp_path / "s.csv")
    console = Console(file=io.StringIO(), width=80)
    print_series(report, console)

    assert TypeAdapter(SeriesReport).validate_json((tmp_path / "s.json").read_bytes()) == report
    page = (tmp_path / "s.html").read_text()
    assert "Latency against rate" in page
    assert "open loop, poisson arrivals" in page and "2.5 requests/s" not in page
    rows = csv.DictReader((tmp_path / "s.csv").read_text().splitlines())
    assert [row["rate"] for row in rows] == ["10.0", "20.0"]
    text = console.file.getvalue()
    assert "20" in text and max(map(len, text.splitlines())) <= 80


def test_the_legend_of_a_series_hides_neither_the_curves_nor_the_title():
    figure = Figure(figsize=(10.8, 3.3), layout="constrained")
    axes = figure.add_subplot()

    draw_series(axes, series().trials, {"ttft": 0.15})
    FigureCanvasAgg(figure).draw()

    legend = axes.get_legend().get_window_extent()
    assert legend.y0 >= axes.get_window_extent().y1 - 1
    assert legend.x0 > axes._left_title.get_window_extent().x1


LIVE = LoadConfig("localhost:1", "dates", ClosedLoop(16), num_requests=1000)


def live_text(figures: Figures, config: LoadConfig = LIVE) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(config, figures))
    return console.file.getvalue().splitlines()


def test_the_live_table_shows_the_last_seconds_and_fits_into_a_terminal():
    times = iter([0.0, 1.0, *[2.0] * 20])
    figures = Figures(clock=lambda: next(times))
    figures.look(SimpleNamespace(records=[], num_in_flight=3))
    figures.look(SimpleNamespace(records=[good(0), good(1), refused(2)], num_in_flight=16))

    title, progress, *lines = (line.rstrip() for line in live_text(figures))

    assert title == "dates: closed loop, 16 at a time"
    assert progress == "2 s, 3 of 1,000 requests"
    assert max(map(len, lines)) <= 40
    rows = [line.split() for line in lines]
    assert ["requests/s", "1.0", "1.0"] in rows  # two in two seconds
    assert ["errors", "1", "1"] in rows and ["in", "flight", "16"] in rows
    assert ["TTFT", "100.0", "100.0", "100.0"] in rows
    assert ["ITL", "55.0"] in [row[:2] for row in rows]


def test_the_live_table_keeps_its_width_and_says_when_a_test_ends():
    times = iter([0.0, *[90.0] * 30])
    figures = Figures(clock=lambda: next(times))
    figures.look(SimpleNamespace(records=[], num_in_flight=0))
    config = replace(LIVE, num_requests=None, duration=90.0)

    empty = live_text(figures, config)
    figures.look(SimpleNamespace(records=[good(0)] * 99, num_in_flight=1))

    full = live_text(figures, config)
    assert (empty[1], full[1]) == ("90 of 90 s, 0 requests", "90 of 90 s, 99 requests")
    assert empty[2] == full[2]


def test_what_is_older_than_the_last_seconds_is_no_longer_shown():
    times = iter([0.0, 1.0, 9.0, *[9.0] * 20])
    figures = Figures(clock=lambda: next(times))
    for records in ([], [good(0)], [good(0), good(1)]):
        figures.look(SimpleNamespace(records=records, num_in_flight=0))

    assert (len(figures.recent), figures.num_ended) == (1, 2)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("loadtest.reports.live.LINE_INTERVAL", 0.0)
    console = Console(file=io.StringIO(), width=80)

    with shown(LIVE, console) as watch:
        watch(SimpleNamespace(records=[good(0), refused(1)], num_in_flight=4))

    assert "dates: 0 s, 2 of 1,000 requests, 1 failed, 4 in flight" in console.file.getvalue()
