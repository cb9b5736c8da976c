"""Writes a load test as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from loadtest.arrival.arrival import OpenLoop
from loadtest.errors import LoadTestError
from loadtest.goals import Slo
from loadtest.load_report import LoadReport
from loadtest.metrics import Distribution, LoadSummary
from loadtest.reports.report import notes, series_notes
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport
from loadtest.trial import Origin

try:
    from jinja2 import Environment, PackageLoader

    from loadtest.reports.charts import charts_of, series_chart
except ImportError as error:
    raise LoadTestError(
        "pages need jinja2 and matplotlib; install them with: pip install 'tokenweir[loadtest]'"
    ) from error

_TITLE = "Latency in milliseconds, from when a request was due"
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = (
    ("TTFT", "time_to_first_token"),
    ("ITL", "inter_token_latency"),
    ("TPOT", "time_per_output_token"),
    ("end to end", "end_to_end"),
    ("at server: queue", "server_queue"),
    ("at server: TTFT", "server_first_token"),
    ("client delay", "send_delay"),
)


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    title: str
    source: str  # a data URI
    is_wide: bool


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write_html(report: LoadReport, path: Path) -> None:
    """Write figures, pictures, settings and origin of a load test, all or nothing."""
    tables = [_totals(report), _latencies(_TITLE, report.summary)]
    if report.kinds:
        tables.append(_kinds(report))
    if report.summary.errors:
        errors = tuple((name, str(count)) for name, count in report.summary.errors.items())
        tables.append(Table("Errors", ("status", "count"), errors))
    charts = charts_of(report)
    pictures = [_picture(title, svg, is_wide=title == charts[-1][0]) for title, svg in charts]
    page = _page(
        title=f"Load test of {report.config.model}",
        subtitle=str(report.config.arrival),
        problems=report.problems,
        well="No request failed, no bound was missed, no answer is known to be wrong.",
        notes=notes(report),
        tables=tables,
        pictures=pictures,
        settings=Table("Settings", ("", ""), tuple(_settings(report))),
    )
    write_atomically(path, page.encode())


def write_series_html(report: SeriesReport, path: Path) -> None:
    """Write latencies against rates, all or nothing."""
    config = report.origin.config
    bounds = dict(config.slo.bounds) if config.slo else {}
    pictures = []
    if report.trials:
        chart = series_chart(report.trials, bounds)
        pictures.append(_picture("Latency against rate", chart, is_wide=True))
    page = _page(
        title=f"Load tests of {config.model}",
        subtitle="search for the highest rate" if report.search else "sweep of rates",
        problems=report.problems,
        well="A rate that keeps the bounds was found." if report.search else "No request failed.",
        notes=series_notes(report),
        tables=[_trials(report)],
        pictures=pictures,
        settings=Table("Settings", ("", ""), tuple(_settings(report.origin))),
    )
    write_atomically(path, page.encode())


def _page(**content: object) -> str:
    environment = Environment(
        loader=PackageLoader("loadtest.reports", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(**content)


def _picture(title: str, svg: str, is_wide: bool) -> Picture:
    data = base64.b64encode(svg.encode()).decode()
    return Picture(title, f"data:image/svg+xml;base64,{data}", is_wide)


def _totals(report: LoadReport) -> Table:
    summary, good, checks = report.summary, report.goodput, report.checks
    rows = [
        ("answered", f"{summary.num_ok:,} of {summary.num_due:,}"),
        ("duration", f"{summary.duration:.2f} s"),
        ("throughput", f"{summary.requests_per_second:.2f} requests/s"),
        ("output tokens", f"{summary.output_tokens_per_second:,.1f}/s"),
        ("most in flight", f"{summary.max_in_flight:,}"),
    ]
    if good is not None:
        rows.append(("goodput", f"{good.per_second:.2f} requests/s, {good.share:.1%} of all"))
    rows += [("kept" if goal.is_kept else "missed", str(goal)) for goal in report.goals]
    if checks.num_expected:
        right = checks.num_expected - checks.num_wrong_expected
        rows.append(("answers as expected", f"{right} of {checks.num_expected}"))
    if checks.num_verified:
        right = checks.num_verified - checks.num_wrong_verified
        rows.append(("answers as alone", f"{right} of {checks.num_verified}"))
    if report.own is not None:
        rows.append(("load test itself", str(report.own)))
    return Table("The whole", ("", ""), tuple(rows))


def _latencies(title: str, summary: LoadSummary) -> Table:
    rows = []
    for name, field in _LATENCIES:
        found: Distribution | None = getattr(summary, field)
        if found is not None:
            values = (f"{getattr(found, one) * 1000:,.1f}" for one in _STATISTICS)
            rows.append((name, *values, f"{found.count:,}"))
    return Table(title, ("", *_STATISTICS, "count"), tuple(rows))


def _kinds(report: LoadReport) -> Table:
    rows = []
    for name, summary in report.kinds.items():
        latencies = (summary.time_to_first_token, summary.time_per_output_token, summary.end_to_end)
        ends = [("", "") if one is None else _ends(one) for one in latencies]
        answered = f"{summary.num_ok:,} of {summary.num_due:,}"
        rows.append((name or "(none)", answered, *(value for pair in ends for value in pair)))
    columns = ("kind", "answered", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99")
    return Table("By kind, milliseconds", columns, tuple(rows))


def _ends(latency: Distribution) -> tuple[str, str]:
    return f"{latency.p50 * 1000:,.1f}", f"{latency.p99 * 1000:,.1f}"


def _trials(report: SeriesReport) -> Table:
    rows = []
    for trial in sorted(report.trials, key=lambda one: one.rate):
        summary = trial.summary
        latencies = (summary.time_to_first_token, summary.time_per_output_token, summary.end_to_end)
        kept = "not valid" if trial.invalid else "yes" if trial.is_kept else "no"
        good = f"{trial.goodput.share:.1%}" if trial.goodput else ""
        values = ("" if one is None else f"{one.p99 * 1000:,.1f}" for one in latencies)
        answered = f"{summary.num_ok:,} of {summary.num_due:,}"
        rows.append((f"{trial.rate:.4g}", kept, good, answered, *values))
    columns = (
        "requests/s",
        "kept",
        "goodput",
        "answered",
        "TTFT p99",
        "TPOT p99",
        "end to end p99",
    )
    return Table("By rate, milliseconds", columns, tuple(rows))


def _settings(report: LoadReport | Origin) -> Iterator[tuple[str, str]]:
    """Yield what was set and where the figures come from."""
    for one in fields(report.config):
        value = getattr(report.config, one.name)
        if isinstance(report, Origin) and isinstance(value, OpenLoop):
            yield "arrival", f"open loop, {value.kind} arrivals"  # each test has its rate
        elif value not in (None, 0, False) or one.name == "seed":
            yield one.name.replace("_", " "), _shown(value)
    for name in ("work", "started_at", "command", "commit", "machine"):
        yield name.replace("_", " "), str(getattr(report, name))
    yield from report.versions.items()


def _shown(value: object) -> str:
    if not isinstance(value, Slo):
        return str(value)
    bounds = ", ".join(f"{name} {bound * 1000:g} ms" for name, bound in value.bounds.items())
    return f"{bounds}, percentile {value.percentile:g}"
