"""The command that measures a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.exit_codes import DONE, FAILED
from server.cli.extras import needs
from server.cli.interruption import Interruption, cleaned_up
from server.cli.load_comparison import compare
from server.cli.load_test_files import ReportFiles
from server.cli.load_test_options import (
    REQUEST_OPTIONS,
    config_of,
    load_test_options,
    refuse_unused,
    work_of,
)
from server.cli.options import Number, any_path, examples, read_rates
from server.cli.server_options import Server

if TYPE_CHECKING:
    from loadtest.config import LoadConfig
    from loadtest.load_report import LoadReport
    from loadtest.series import SeriesReport
    from loadtest.target.open_target import ClientArguments
    from loadtest.work.ask import Work

_NEEDED = ("loadtest.reports.live", "loadtest.reports.report", "loadtest.runner")


@click.group(
    short_help="Measure latencies and throughput of a server.",
    invoke_without_command=True,
    epilog=examples(
        "tokenweir loadtest --model dates --concurrency 16 --requests 500 --beam 4",
        "tokenweir loadtest --model dates --prompts dates.txt --requests 1000",
        "tokenweir loadtest --model dates --rate 50 --json run.json --html run.html",
        "tokenweir loadtest --model dates --rate 50 --slo e2e=2s --verify 0.05",
        "tokenweir loadtest --model dates --search --slo e2e=500ms --duration 20",
        "tokenweir loadtest compare before.json after.json",
    ),
)
@click.option(
    "--model", metavar="NAME", help="A model of the server; `tokenweir models` lists them."
)
@load_test_options
@click.option("--search", is_flag=True, help="Find the highest rate that keeps --slo.")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=6, show_default=True, help="Of --search."
)
@click.option(
    "--tolerance",
    type=Number(min=0.001, max=1),
    default=0.05,
    show_default=True,
    help="Of --search: the width of the interval at which a round ends.",
)
@click.option(
    "--sweep", callback=read_rates, metavar="RATE,...", help="Run at each rate, such as 10,20,40."
)
@click.option("--strict", is_flag=True, help="Exit with 1 where the load test itself was late.")
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
@click.option("--csv", "csv_file", type=any_path, help="Write a row a request here.")
@click.option("--html", "html_file", type=any_path, help="Write a page with pictures here.")
@click.option("--png", "png_file", type=any_path, help="Draw the latency distributions here.")
@click.option("--answers", type=any_path, help="Write requests and answers here, as JSONL.")
@click.pass_context
def loadtest(context: click.Context, /, **typed: Any) -> int | None:
    """Send many requests and print latencies, throughput and errors.

    Latencies count from the time a request was due, so a server that falls behind cannot hide it:
    TTFT (first token), ITL (between tokens), TPOT (per token of a request), end to end. Options of
    `tokenweir generate` that say how it answers, as --beam 4, hold for all requests. Exits with 1
    if a request failed, a bound was missed or an answer is wrong. Ctrl-C ends the test and reports
    what was answered.
    """
    if context.invoked_subcommand is not None:
        return None
    if typed["model"] is None:
        raise click.MissingParameter(ctx=context, param=context.command.params[0])
    refuse_unused(context, typed)
    return int(_measure(**typed))


loadtest.params += REQUEST_OPTIONS
loadtest.add_command(compare)


@needs("loadtest")
def _measure(
    *,
    search: bool,
    rounds: int,
    tolerance: float,
    sweep: tuple[float, ...],
    strict: bool,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    png_file: Path | None,
    answers: Path | None,
    **typed: Any,
) -> int:
    is_series = search or bool(sweep)
    if search and sweep:
        raise click.UsageError("--search and --sweep both say at which rates; give one of them")
    if sweep and typed["rate"] is not None:
        raise click.UsageError("--rate and --sweep both say at which rates; give one of them")
    if is_series and (png_file or answers):
        raise click.UsageError("--png and --answers are of one load test; leave them out")
    files = ReportFiles(json_file, csv_file, html_file, png_file, answers)
    with cleaned_up() as interruption, ExitStack() as stack:
        with _prepared() as early:
            config = config_of(typed, keep_answers=answers is not None, is_series=is_series)
            files.check()
            work = work_of(typed, stack)
        arguments = partial(_client_arguments, typed["server"], typed["admin_token"])
        if is_series:
            rule = partial(_report_series, rounds=rounds, tolerance=tolerance, sweep=sweep)
            return _end(rule(config, work, files, arguments, early), interruption, strict)
        report = report_load_test(config, work, files, arguments, early)
        return _end(report, interruption, strict)


@contextmanager
def _prepared() -> Iterator[list[int]]:
    """Import what a load test needs; note the signals meanwhile, so that it leaves a result."""
    from loadtest.interruption import signals_noted

    with signals_noted() as early:
        for module in _NEEDED:
            import_module(module)
        yield early


def _client_arguments(server: Server, admin_token: str | None) -> Mapping[str, Any]:
    return {**server.client_arguments, "admin_token": admin_token}


def _end(report: LoadReport | SeriesReport, interruption: Interruption, strict: bool) -> int:
    """Return the exit code; a line for every problem."""
    if report.interrupted:
        return interruption.exit_code
    problems = report.problems if strict else report.faults
    for reason in () if strict else report.invalid:
        click.echo(f"warning: {reason}", err=True)
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    return FAILED if problems else DONE


def report_load_test(
    config: LoadConfig,
    work: Work,
    files: ReportFiles,
    client_arguments: ClientArguments = dict,
    early: Sequence[int] = (),
) -> LoadReport:
    """Run a load test, write its files, print its table; a signal in `early` has ended it."""
    from engine.machine import machine_name
    from loadtest.interruption import signals_held
    from loadtest.origin import code_commit, typed_command
    from loadtest.reports.live import shown
    from loadtest.reports.report import print_table
    from loadtest.runner import LoadTest

    with ExitStack() as stack:
        with shown(config) as watch:
            test = LoadTest(config, work, watch, client_arguments)
            report = test.run(early=early)
            stack.enter_context(signals_held())
        report = replace(
            report, command=typed_command(), commit=code_commit(), machine=machine_name()
        )
        files.write(report, test.kept)
    print_table(report)
    return report


def _report_series(
    config: LoadConfig,
    work: Work,
    files: ReportFiles,
    client_arguments: ClientArguments,
    early: Sequence[int],
    *,
    rounds: int,
    tolerance: float,
    sweep: tuple[float, ...],
) -> SeriesReport:
    """Run several load tests, write their files, print their table."""
    import asyncio

    from engine.machine import machine_name
    from loadtest.interruption import signals_held
    from loadtest.origin import code_commit, typed_command
    from loadtest.reports.live import shown
    from loadtest.reports.report import print_series, trial_line
    from loadtest.runner import run
    from loadtest.search import SearchRule
    from loadtest.series import Series

    with asyncio.Runner() as runner:

        def run_shown(one: LoadConfig) -> LoadReport:
            with shown(one) as watch:
                return run(one, work, watch, client_arguments, runner.run, early)

        series = Series(config, run_shown, lambda trial: click.echo(trial_line(trial), err=True))
        rule = SearchRule(series.first_rate, tolerance, rounds)
        report = series.sweep(sweep) if sweep else series.search(rule)
        with signals_held():
            origin = replace(
                report.origin, command=typed_command(), commit=code_commit(), machine=machine_name()
            )
            report = replace(report, origin=origin)
            files.write_series(report)
    print_series(report)
    return report
