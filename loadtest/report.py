"""Shows the outcome of a load test as tables, and keeps all of it as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.errors import LoadTestError
from loadtest.metrics import Distribution, LoadSummary, OwnLoad
from loadtest.result_file import write_atomically
from loadtest.runner import LoadReport

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "count")
_LABEL_WIDTH, _VALUE_WIDTH = 22, 8  # with borders; five digits
_REPORT: TypeAdapter[LoadReport] = TypeAdapter(LoadReport)


def print_table(report: LoadReport, console: Console | None = None) -> None:
    """Print throughput, latencies and errors."""
    console = console or Console()
    title = f"Load test of {report.config.model}: {report.config.load}"
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(_totals_table(report))
    for table in _latency_tables(report.summary, console.width):
        console.print(table)
    if report.summary.errors:
        console.print(_error_table(report))
    for note in notes(report):
        console.print(f"- {note}", markup=False, highlight=False)


def notes(report: LoadReport) -> list[str]:
    """Return what a reader of the numbers has to know besides."""
    num_requests, num_prompts = len(report.records), len(report.config.prompts)
    summary, own = report.summary, report.own
    found = []
    if report.interrupted:
        found.append(
            f"interrupted: {num_requests} of {report.config.num_requests} requests had ended"
        )
    if num_requests > num_prompts:
        found.append(
            f"{num_prompts} prompts for {num_requests} requests: they repeat, and "
            f"{summary.cached_input_tokens:,} of {summary.input_tokens:,} input tokens came from "
            "what the server had kept. New prompts may take longer: --prompts FILE gives others"
        )
    if own is not None and own.is_limit:
        found.append(
            f"the load test itself was the limit ({_own(own)}): the server may be faster. Give it "
            "a machine of its own, or run several with a smaller load"
        )
    return found


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


def _totals_table(report: LoadReport) -> Table:
    summary = report.summary
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("requests answered", f"{summary.num_ok} of {len(report.records)}")
    table.add_row("duration", f"{summary.duration:.2f} s")
    table.add_row("throughput", f"{summary.requests_per_second:.2f} requests/s")
    if report.method == "generate":
        table.add_row("", f"{summary.output_tokens_per_second:.1f} output tokens/s")
    table.add_row("most requests in flight", str(summary.max_in_flight))
    if summary.mean_batch_size is not None:
        table.add_row("mean batch at the server", f"{summary.mean_batch_size:.1f} sequences")
    if report.own is not None:
        table.add_row("load test itself", _own(report.own))
    return table


def _own(own: OwnLoad) -> str:
    delay = own.loop_delay
    late = f", {delay.p99 * 1000:.1f} ms late (p99)" if delay else ""
    return f"{own.processor_share:.0%} of a core{late}"


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
