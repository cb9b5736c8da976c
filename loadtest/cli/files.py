"""The files that a load test writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from loadtest.answers import KeptAnswer
from loadtest.load_report import LoadReport
from loadtest.reports.csv_file import write_requests, write_trials
from loadtest.reports.html_file import write_html, write_series_html
from loadtest.reports.plots import write_png
from loadtest.reports.report import check_place, write_json, write_series_json
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport
from loadtest.work.expecting import to_lines


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files of the outcome; None: not written."""

    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    png: Path | None = None
    answers: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(filter(None, (self.json, self.csv, self.html, self.png, self.answers)))

    def check(self) -> None:
        """Make their directories before the test and not behind it."""
        for path in self.paths:
            check_place(path)

    def write(self, report: LoadReport, kept: Sequence[KeptAnswer]) -> None:
        """Write all of them."""
        _write(self.json, lambda path: write_json(report, path))
        _write(self.csv, lambda path: write_requests(report, path))
        _write(self.html, lambda path: write_html(report, path))
        _write(self.png, lambda path: write_png(report, path))
        lines = to_lines((one.ask, one.answer) for one in kept)
        _write(self.answers, lambda path: write_atomically(path, lines.encode()))

    def write_series(self, report: SeriesReport) -> None:
        """Write those that several load tests have."""
        _write(self.json, lambda path: write_series_json(report, path))
        _write(self.csv, lambda path: write_trials(report, path))
        _write(self.html, lambda path: write_series_html(report, path))


def _write(path: Path | None, write: Callable[[Path], None]) -> None:
    if path is not None:
        write(path)
        click.echo(f"written: {path}")
