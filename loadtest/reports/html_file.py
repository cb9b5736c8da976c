"""Writes a load test as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from jinja2 import Environment, PackageLoader

from loadtest.arrival.arrival import OpenLoop
from loadtest.goals import Slo
from loadtest.load_report import LoadReport, Origin
from loadtest.reports.charts import charts_of, series_chart
from loadtest.reports.report import notes, series_notes
from loadtest.reports.tables import Table, errors, kinds, latencies, totals, trials
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    title: str
    source: str  # a data URI
    is_wide: bool


def write_html(report: LoadReport, path: Path) -> None:
    """Write figures, pictures, settings and origin of a load test, all or nothing."""
    tables = [totals(report), latencies(report.summary), kinds(report), errors(report)]
    charts = charts_of(report)
    pictures = [_picture(title, svg, is_wide=title == charts[-1][0]) for title, svg in charts]
    page = _page(
        title=f"Load test of {report.config.model}",
        subtitle=str(report.config.arrival),
        problems=report.problems,
        well="No request failed, no bound was missed, no answer is known to be wrong.",
        notes=notes(report),
        tables=[table for table in tables if table.rows],
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
        tables=[trials(report)],
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


def _settings(report: Origin) -> Iterator[tuple[str, str]]:
    """Yield what was set and where the figures come from."""
    for one in fields(report.config):
        value = getattr(report.config, one.name)
        if isinstance(value, OpenLoop) and not isinstance(report, LoadReport):
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
