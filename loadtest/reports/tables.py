"""Tables of load tests, as a terminal and a page show them."""

from __future__ import annotations

from typing import NamedTuple

from loadtest.load_report import LoadReport, Trial
from loadtest.metrics import Distribution, LoadSummary
from loadtest.series import SeriesReport

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "count")
_LATENCIES = {
    "first token (TTFT)": "time_to_first_token",
    "inter-token (ITL)": "inter_token_latency",
    "per token (TPOT)": "time_per_output_token",
    "end to end": "end_to_end",
    "server queue": "server_queue",
    "server TTFT": "server_first_token",
    "client delay": "send_delay",
}


class Table(NamedTuple):
    """Rows of texts; the first column names them."""

    title: str
    columns: tuple[str, ...]  # empty ones: there is no head
    rows: tuple[tuple[str, ...], ...]


def totals(report: LoadReport) -> Table:
    """Return throughput, goals and checks."""
    summary, checks = report.summary, report.checks
    rows = [
        ("requests answered", _answered(summary)),
        ("duration", f"{summary.duration:.2f} s"),
        ("throughput", f"{summary.requests_per_second:.2f} requests/s"),
    ]
    if summary.output_tokens_per_second:
        rows.append(("", f"{summary.output_tokens_per_second:.1f} output tokens/s"))
    if (good := report.goodput) is not None:
        rows.append(("goodput", f"{good.per_second:.2f} requests/s, {good.share:.1%} of all"))
    rows += [("kept" if goal.is_kept else "missed", str(goal)) for goal in report.goals]
    if checks.num_expected:
        right = checks.num_expected - checks.num_wrong_expected
        rows.append(("answers as expected", f"{right} of {checks.num_expected}"))
    if checks.num_verified:
        right = checks.num_verified - checks.num_wrong_verified
        rows.append(("answers as alone", f"{right} of {checks.num_verified}"))
    rows.append(("most requests in flight", str(summary.max_in_flight)))
    if summary.mean_batch_size is not None:
        rows.append(("mean batch at the server", f"{summary.mean_batch_size:.1f} sequences"))
    if report.own is not None:
        rows.append(("load test itself", str(report.own)))
    return Table("The whole", ("", ""), tuple(rows))


def latencies(summary: LoadSummary) -> Table:
    """Return the statistics of every latency that was measured."""
    rows = []
    for name, field in _LATENCIES.items():
        found: Distribution | None = getattr(summary, field)
        if found is not None:
            values = (_milliseconds(getattr(found, one)) for one in STATISTICS[:-1])
            rows.append((name, *values, str(found.count)))
    title = "Latency in milliseconds, from when a request was due"
    return Table(title, ("", *STATISTICS), tuple(rows))


def kinds(report: LoadReport) -> Table:
    """Return a row for each kind of a mix."""
    rows = (
        (name or "(none)", _answered(summary), *map(_two, _main_latencies(summary)))
        for name, summary in report.kinds.items()
    )
    title = "By kind, 50th and 99th percentiles in milliseconds"
    return Table(title, ("kind", "answered", "TTFT", "TPOT", "end to end"), tuple(rows))


def errors(report: LoadReport) -> Table:
    """Return a row for each error, with the first message."""
    rows = []
    for error, count in report.summary.errors.items():
        first = next(record.message for record in report.records if record.error == error)
        rows.append((error, str(count), first))
    return Table("Errors", ("status", "count", "the first message"), tuple(rows))


def trials(report: SeriesReport) -> Table:
    """Return a row for each load test of several."""
    rows = (
        (
            f"{trial.rate:.4g}",
            verdict(trial),
            f"{trial.goodput.share:.1%}" if trial.goodput else "",
            str(trial.num_failed),
            *((one and _milliseconds(one.p99)) or "" for one in _main_latencies(trial.summary)),
        )
        for trial in report.trials
    )
    title = f"Load tests of {report.origin.config.model}, 99th percentiles in milliseconds"
    columns = ("rate/s", "kept", "goodput", "failed", "TTFT", "TPOT", "end to end")
    return Table(title, columns, tuple(rows))


def verdict(trial: Trial) -> str:
    """Return whether bounds were kept."""
    return "not valid" if trial.invalid else "yes" if trial.is_kept else "no"


def _answered(summary: LoadSummary) -> str:
    return f"{summary.num_ok} of {summary.num_due}"


def _main_latencies(summary: LoadSummary) -> tuple[Distribution | None, ...]:
    return (summary.time_to_first_token, summary.time_per_output_token, summary.end_to_end)


def _two(latency: Distribution | None) -> str:
    return f"{_milliseconds(latency.p50)} {_milliseconds(latency.p99)}" if latency else ""


def _milliseconds(seconds: float) -> str:
    # Three digits at least, and short enough for a terminal of 80 columns.
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f}"
