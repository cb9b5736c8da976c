"""Writes a load test as CSV: a row a request, or a row a rate."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from loadtest.load_report import LoadReport
from loadtest.metrics import Distribution, RequestRecord
from loadtest.result_file import write_atomically
from loadtest.series import SeriesReport

_REQUEST = (
    "index turn kind status reason scheduled sent finished ttft tpot e2e input_tokens "
    "cached_input_tokens output_tokens finish_reason server_queue server_ttft server_batch check "
    "counts"
).split()
_TRIAL = (
    "rate seed kept valid due answered failed requests_per_second goodput_per_second "
    "goodput_share ttft_p50 ttft_p99 tpot_p50 tpot_p99 e2e_p50 e2e_p99"
).split()


def write_requests(report: LoadReport, path: Path) -> None:
    """Write a row a request, times in seconds; `counts` is 0 for those in no figure."""
    write_rows(_REQUEST, (_request(record, report) for record in report.records), path)


def write_trials(report: SeriesReport, path: Path) -> None:
    """Write a row a rate, times in seconds."""
    rows = []
    for trial in report.trials:
        summary, good = trial.summary, trial.goodput
        latencies = (summary.time_to_first_token, summary.time_per_output_token, summary.end_to_end)
        rows.append(
            [
                *(trial.rate, trial.seed, int(trial.is_kept), int(not trial.invalid)),
                *(summary.num_due, summary.num_ok, trial.num_failed, summary.requests_per_second),
                *((good.per_second, good.share) if good else ("", "")),
                *(value for latency in latencies for value in _ends(latency)),
            ]
        )
    write_rows(_TRIAL, rows, path)


def write_rows(names: Sequence[str], rows: Iterable[Sequence[object]], path: Path) -> None:
    """Write rows below their names, all or nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def _request(record: RequestRecord, report: LoadReport) -> list[object]:
    return [
        *(record.index, record.turn, record.kind, record.status, record.reason),
        *(record.scheduled, record.sent, record.finished),
        *(record.time_to_first_token, record.time_per_output_token, record.end_to_end),
        *(record.input_tokens, record.cached_input_tokens, record.output_tokens),
        *(record.finish_reason, record.server_queue, record.server_first_token),
        *(record.server_batch_size, record.check, int(report.window.has(record.scheduled))),
    ]


def _ends(latency: Distribution | None) -> tuple[object, object]:
    return ("", "") if latency is None else (latency.p50, latency.p99)
