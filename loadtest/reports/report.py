"""Shows the outcome of a load test as tables, and keeps all of it as JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.load_report import LoadReport, Trial
from loadtest.metrics import LoadSummary
from loadtest.reports.tables import Table, errors, kinds, latencies, totals, trials, verdict
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport

_LABEL_WIDTH, _VALUE_WIDTH = 22, 8  # borders included; five digits
_MAX_WRONG = 10  # wrong answers that are shown
_REPORT: TypeAdapter[LoadReport] = TypeAdapter(LoadReport)
_SERIES: TypeAdapter[SeriesReport] = TypeAdapter(SeriesReport)


def print_table(report: LoadReport, console: Console | None = None) -> None:
    """Print throughput, latencies, goals and errors."""
    console = console or Console()
    title = f"Load test of {report.config.model}: {report.config.arrival}"
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(_shown_totals(report))
    for table in _latency_tables(report.summary, console.width):
        console.print(table)
    if report.kinds:
        console.print(_shown(kinds(report)))
    if report.summary.errors:
        console.print(_shown(errors(report), style="bold red"))
    for note in notes(report):
        console.print(f"- {note}", markup=False, highlight=False)


def notes(report: LoadReport) -> list[str]:
    """Return what a reader of the numbers has to know besides."""
    found = []
    if report.interrupted:
        asked = report.config.num_requests
        of = "" if asked is None else f" of {asked}"
        found.append(f"interrupted: {len(report.records)}{of} requests had ended")
    if left_out := len(report.records) - report.summary.num_due:
        found.append(f"{left_out} requests of the warm-up and the cool-down are in no figure")
    if note := _repeats(report):
        found.append(note)
    if number := report.checks.num_not_compared:
        found.append(f"{number} answers were not compared: none is known to their requests")
    found += [str(wrong) for wrong in report.checks.wrong[:_MAX_WRONG]]
    return found


def _repeats(report: LoadReport) -> str | None:
    summary, different = report.summary, report.num_different
    num_requests = sum(record.turn == 0 for record in report.records)
    if different is None or num_requests <= different:
        return None
    cached, asked = summary.cached_input_tokens, summary.input_tokens
    kept = (
        "the server does not tell how many input tokens it had kept"
        if cached is None
        else f"{cached:,} of {asked:,} input tokens came from what the server had kept"
    )
    return (
        f"{different} prompts for {num_requests} requests: they repeat, and {kept}. New prompts "
        "may take longer: --prompts FILE or --input-tokens give others"
    )


def check_place(path: Path) -> None:
    """Make the directory of a file that is to be written; LoadTestError if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadTestError(f"cannot write {path}: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "it is a directory" if path.is_dir() else f"{path.parent} is not writable"
        raise LoadTestError(f"cannot write {path}: {reason}; give another file")


def write_json(report: LoadReport, path: Path) -> None:
    """Write the configuration, the versions, the summary and every record, all or nothing."""
    write_atomically(path, _REPORT.dump_json(report, indent=2) + b"\n")


def write_series_json(report: SeriesReport, path: Path) -> None:
    """Write the figures of every rate, all or nothing."""
    write_atomically(path, _SERIES.dump_json(report, indent=2) + b"\n")


def print_series(report: SeriesReport, console: Console | None = None) -> None:
    """Print a row a rate, and what the search found."""
    console = console or Console()
    console.print(_shown(trials(report), style="bold"))
    for line in series_notes(report):
        console.print(f"- {line}", markup=False, highlight=False)


def trial_line(trial: Trial) -> str:
    """Return what one load test of several has shown, in a line."""
    bounds = ", ".join(map(str, trial.goals)) or f"{trial.num_failed} requests failed"
    return f"{trial.rate:.4g} requests/s, kept: {verdict(trial)}; {bounds}"


def series_notes(report: SeriesReport) -> list[str]:
    """Return what was found, and how sure that is."""
    found = ["interrupted: these are the rates that were done"] if report.interrupted else []
    search = report.search
    if search is None:
        return found
    found.append(f"searched by {search.rule}")
    if search.rate is not None:
        rounds = len(search.rounds)
        sure = (
            f"{search.confidence:.1%} interval of the median, of {rounds} rounds"
            if rounds > 1
            else "of one round, which says nothing of others"
        )
        found.append(
            f"highest rate that keeps the bounds: {search.rate:.4g} requests/s, "
            f"{search.low:.4g} to {search.high:.4g} ({sure})"
        )
        found += _too_short(report.origin.config, search.rate)
    return found


def _too_short(config: LoadConfig, rate: float) -> list[str]:
    """Warn if a test at a rate ends before a growing queue would show."""
    seconds = config.duration or math.inf
    if config.num_requests is not None:
        seconds = min(seconds, config.num_requests / rate)
    if config.slo is None or seconds >= config.slo.seconds_to_see:
        return []
    return [
        f"the tests at this rate last {seconds:.3g} s, too short for these bounds: a queue may "
        "grow all the time and not reach them, so the rate may be too high; give --duration "
        f"{config.slo.seconds_to_see:g} and no --requests"
    ]


def _shown(table: Table, caption: str | None = None, style: str | None = None) -> RichTable:
    """Return a table for a terminal."""
    made = RichTable(
        title=table.title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style=style,
    )
    for number, column in enumerate(table.columns):
        is_text = number == 0 or column == "the first message"
        made.add_column(
            column,
            style="bold" if number == 0 else None,
            justify="left" if is_text else "right",
            overflow="fold",
        )
    for row in table.rows:
        made.add_row(*map(Text, row))  # as it is: it may have brackets in it
    return made


def _shown_totals(report: LoadReport) -> RichTable:
    made = RichTable(show_header=False)
    made.add_column(style="bold")
    made.add_column(justify="right", overflow="fold")
    for name, value in totals(report).rows:
        made.add_row(Text(name, "red" if name == "missed" else ""), value)
    return made


def _latency_tables(summary: LoadSummary, width: int) -> Iterator[RichTable]:
    """Yield the latencies, as many columns beside each other as fit into the width."""
    title, columns, rows = latencies(summary)
    num_columns = max(1, (width - _LABEL_WIDTH) // _VALUE_WIDTH)
    caption = "of the requests answered" if summary.num_ok else "no request was answered"
    for start in range(1, len(columns), num_columns):
        part = slice(start, start + num_columns)
        of_part = tuple((row[0], *row[part]) for row in rows)
        yield _shown(Table(title, ("", *columns[part]), of_part), caption)
