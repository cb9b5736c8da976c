"""Shows the outcome of a load test as tables, and keeps all of it as JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.load_report import LoadReport
from loadtest.metrics import Distribution, LoadSummary
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport
from loadtest.trial import Trial

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "count")
_LABEL_WIDTH, _VALUE_WIDTH = 22, 8  # borders included; five digits
_MAX_WRONG = 10  # wrong answers that are shown
_REPORT: TypeAdapter[LoadReport] = TypeAdapter(LoadReport)
_SERIES: TypeAdapter[SeriesReport] = TypeAdapter(SeriesReport)


def print_table(report: LoadReport, console: Console | None = None) -> None:
    """Print throughput, latencies, goals and errors."""
    console = console or Console()
    title = f"Load test of {report.config.model}: {report.config.arrival}"
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(_totals_table(report))
    for table in _latency_tables(report.summary, console.width):
        console.print(table)
    if report.kinds:
        console.print(_kind_table(report))
    if report.summary.errors:
        console.print(_error_table(report))
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
    title = f"Load tests of {report.origin.config.model}, 99th percentiles in milliseconds"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("rate/s", "kept", "goodput", "failed", "TTFT", "TPOT", "end to end"):
        table.add_column(column, justify="right", overflow="fold")
    for trial in report.trials:
        summary = trial.summary
        latencies = (summary.time_to_first_token, summary.time_per_output_token, summary.end_to_end)
        table.add_row(
            f"{trial.rate:.4g}",
            _verdict(trial),
            f"{trial.goodput.share:.1%}" if trial.goodput else "",
            str(trial.num_failed),
            *("" if latency is None else _milliseconds(latency.p99) for latency in latencies),
        )
    console.print(table)
    for line in series_notes(report):
        console.print(f"- {line}", markup=False, highlight=False)


def trial_line(trial: Trial) -> str:
    """Return what one load test of several has shown, in a line."""
    bounds = ", ".join(map(str, trial.goals)) or f"{trial.num_failed} requests failed"
    return f"{trial.rate:.4g} requests/s, kept: {_verdict(trial)}; {bounds}"


def _verdict(trial: Trial) -> str:
    return "not valid" if trial.invalid else "yes" if trial.is_kept else "no"


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


def _totals_table(report: LoadReport) -> Table:
    summary, checks = report.summary, report.checks
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    table.add_row("requests answered", f"{summary.num_ok} of {summary.num_due}")
    table.add_row("duration", f"{summary.duration:.2f} s")
    table.add_row("throughput", f"{summary.requests_per_second:.2f} requests/s")
    if summary.output_tokens_per_second:
        table.add_row("", f"{summary.output_tokens_per_second:.1f} output tokens/s")
    if (good := report.goodput) is not None:
        table.add_row("goodput", f"{good.per_second:.2f} requests/s, {good.share:.1%} of all")
    for goal in report.goals:
        table.add_row("kept" if goal.is_kept else Text("missed", "red"), str(goal))
    if checks.num_expected:
        right = checks.num_expected - checks.num_wrong_expected
        table.add_row("answers as expected", f"{right} of {checks.num_expected}")
    if checks.num_verified:
        right = checks.num_verified - checks.num_wrong_verified
        table.add_row("answers as alone", f"{right} of {checks.num_verified}")
    table.add_row("most requests in flight", str(summary.max_in_flight))
    if summary.mean_batch_size is not None:
        table.add_row("mean batch at the server", f"{summary.mean_batch_size:.1f} sequences")
    if report.own is not None:
        table.add_row("load test itself", str(report.own))
    return table


def _kind_table(report: LoadReport) -> Table:
    table = Table(title="By kind, 50th and 99th percentiles in milliseconds", title_justify="left")
    table.add_column("kind", style="bold", overflow="fold")
    for column in ("answered", "TTFT", "TPOT", "end to end"):
        table.add_column(column, justify="right", overflow="fold")
    for name, summary in report.kinds.items():
        table.add_row(
            Text(name or "(none)"),
            f"{summary.num_ok} of {summary.num_due}",
            *map(
                _two,
                (
                    summary.time_to_first_token,
                    summary.time_per_output_token,
                    summary.end_to_end,
                ),
            ),
        )
    return table


def _two(latency: Distribution | None) -> str:
    if latency is None:
        return ""
    return f"{_milliseconds(latency.p50)} {_milliseconds(latency.p99)}"


def _latency_tables(summary: LoadSummary, width: int) -> Iterator[Table]:
    """Yield the latencies, as many columns beside each other as fit into the width."""
    named = {
        "first token (TTFT)": summary.time_to_first_token,
        "inter-token (ITL)": summary.inter_token_latency,
        "per token (TPOT)": summary.time_per_output_token,
        "end to end": summary.end_to_end,
        "server queue": summary.server_queue,
        "server TTFT": summary.server_first_token,
        "client delay": summary.send_delay,
    }
    found = {name: _cells(latency) for name, latency in named.items() if latency is not None}
    num_columns = max(1, (width - _LABEL_WIDTH) // _VALUE_WIDTH)
    for start in range(0, len(_STATISTICS), num_columns):
        columns = _STATISTICS[start : start + num_columns]
        table = Table(
            title="Latency in milliseconds, from when a request was due",
            title_justify="left",
            caption="of the requests answered" if summary.num_ok else "no request was answered",
            caption_justify="left",
        )
        table.add_column("", style="bold")
        for column in columns:
            table.add_column(column, justify="right", overflow="fold")
        for name, cells in found.items():
            table.add_row(name, *(cells[column] for column in columns))
        yield table


def _cells(latency: Distribution) -> dict[str, str]:
    seconds = {name: getattr(latency, name) for name in _STATISTICS if name != "count"}
    return {name: _milliseconds(value) for name, value in seconds.items()} | {
        "count": str(latency.count)
    }


def _milliseconds(seconds: float) -> str:
    # Three digits at least, and short enough for a terminal of 80 columns.
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f}"


def _error_table(report: LoadReport) -> Table:
    table = Table(title="Errors", title_justify="left", title_style="bold red")
    table.add_column("status", style="bold")
    table.add_column("count", justify="right")
    table.add_column("the first message")
    for error, count in report.summary.errors.items():
        first = next(record.message for record in report.records if record.error == error)
        table.add_row(error, str(count), Text(first))  # as it is: it may have brackets in it
    return table
