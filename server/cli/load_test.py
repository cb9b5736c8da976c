"""The command that measures a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.exit_codes import DONE, FAILED, CommandError
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.options import (
    Number,
    any_path,
    examples,
    existing_file,
    model_option,
    timeout_option,
)
from server.cli.server_options import Server, server_option
from server.cli.typed_dates import TYPED_DATES

if TYPE_CHECKING:
    from loadtest.runner import LoadReport
    from loadtest.workload import Arrival, LoadConfig


@click.command(
    short_help="Measure latencies and throughput of a server.",
    epilog=examples(
        "tokenweir loadtest --model dates --concurrency 16 --requests 500",
        "tokenweir loadtest --model dates --prompts dates.txt --requests 1000",
        "tokenweir loadtest --model dates --rate 50 --json run.json --png run.png",
    ),
)
@model_option
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Closed loop: so many streams at any time.  [default: 8, without --rate]",
)
@click.option(
    "--rate",
    type=Number(min=0, min_open=True),
    metavar="PER_SECOND",
    help="Open loop: requests start at this rate whatever the server does.",
)
@click.option(
    "--arrival",
    type=click.Choice(["poisson", "constant"]),
    default="poisson",
    show_default=True,
    help="Pattern of the open loop.",
)
@click.option(
    "--prompts",
    type=existing_file,
    help="UTF-8 text, a prompt a line; for a model of images, their paths.  [default: typed dates]",
)
@click.option("--max-new-tokens", type=click.IntRange(1), help="Of each request.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and prompts.")
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
@click.option("--png", "png_file", type=any_path, help="Draw the latency distributions here.")
@timeout_option
@server_option
@needs("loadtest")
def loadtest(json_file: Path | None, png_file: Path | None, **typed: Any) -> int:
    """Stream many requests and print latencies, throughput and errors; exit with 1 if one failed.

    Latencies count from the time a request was due, so a server that falls behind cannot hide it:
    TTFT (first token), ITL (between tokens), TPOT (per token of a request), end to end. Prompts
    are used in turn, and what a server keeps of one makes its next turn faster. Ctrl-C ends the
    test and reports what was answered.
    """
    config = _load_config(**typed)
    with cleaned_up() as interruption:
        report = report_load_test(config, json_file, png_file, typed["server"])
    for path in filter(None, (json_file, png_file)):
        click.echo(f"written: {path}")
    if report.interrupted:
        return interruption.exit_code
    if failed := num_failed(report):
        raise CommandError(f"{failed} of {len(report.records)} requests failed", FAILED)
    return DONE


def _load_config(
    *,
    model: str,
    requests: int,
    concurrency: int | None,
    rate: float | None,
    arrival: Arrival,
    prompts: Path | None,
    max_new_tokens: int | None,
    seed: int,
    timeout: float,
    server: Server,
) -> LoadConfig:
    if concurrency is not None and rate is not None:
        raise click.UsageError("give --rate for an open loop, or --concurrency for a closed one")
    from loadtest.workload import LoadConfig, read_prompts

    return LoadConfig(
        address=server.address,
        model=model,
        prompts=tuple(TYPED_DATES) if prompts is None else read_prompts(prompts),
        num_requests=requests,
        rate=rate,
        arrival=arrival,
        concurrency=concurrency or 8 if rate is None else None,
        seed=seed,
        timeout=timeout,
        options={} if max_new_tokens is None else {"max_new_tokens": max_new_tokens},
    )


def report_load_test(
    config: LoadConfig,
    json_file: Path | None,
    png_file: Path | None,
    server: Server | None = None,
) -> LoadReport:
    """Run a load test, print its table, write its files; `server` says how it is called."""
    from engine.machine import machine_name
    from loadtest.origin import code_commit, typed_command
    from loadtest.report import check_place, print_table, write_json
    from loadtest.runner import run
    from server.cli.progress import show_progress

    for path in filter(None, (json_file, png_file)):
        check_place(path)
    if png_file is not None:  # what it needs is missed before the test, not behind it
        from loadtest.plots import write_png
    with show_progress("Requests") as progress:
        report = run(config, progress, server.client_arguments if server else {})
    report = replace(report, command=typed_command(), commit=code_commit(), machine=machine_name())
    print_table(report)
    if json_file is not None:
        write_json(report, json_file)
    if png_file is not None:
        write_png(report, png_file)
    return report


def num_failed(report: LoadReport) -> int:
    """Return how many requests were answered with an error."""
    return sum(not record.ok for record in report.records)
