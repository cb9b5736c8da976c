"""The command that measures a server."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from loadtest.cli.comparison import compare
from loadtest.cli.options import REQUEST_OPTIONS, load_test_options, refuse_unused
from loadtest.interruption import signals_noted
from server.cli.exit_codes import DONE, FAILED
from server.cli.extras import needs
from server.cli.interruption import Interruption, cleaned_up
from server.cli.options import Number, Parsed, any_path, examples

if TYPE_CHECKING:
    from loadtest.load_report import LoadReport
    from loadtest.series import SeriesReport


def _read_rates(text: str) -> tuple[float, ...]:
    """Turn "10,20,40" into requests a second."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{text[:100]!r} is not a list of rates above 0, such as 10,20,40")
    return values


@click.group(
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
    "--rounds",
    type=click.IntRange(1, 100),
    default=6,
    show_default=True,
    help="Rounds of --search.",
)
@click.option(
    "--tolerance",
    type=Number(min=0.001, max=1),
    default=0.05,
    show_default=True,
    help="Width of the interval at which a round of --search ends.",
)
@click.option(
    "--sweep",
    type=Parsed("rates", _read_rates),
    metavar="RATE,...",
    help="Run at each rate, such as 10,20,40.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 if the load test itself was late.")
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


@needs("loadtest")
def _measure(
    *, search: bool, rounds: int, tolerance: float, sweep: tuple[float, ...] | None, **typed: Any
) -> int:
    if search and sweep:
        raise click.UsageError("--search and --sweep both say at which rates; give one of them")
    if sweep and typed["rate"] is not None:
        raise click.UsageError("--rate and --sweep both say at which rates; give one of them")
    if (search or sweep) and (typed["png_file"] or typed["answers"]):
        raise click.UsageError("--png and --answers are of one load test; leave them out")
    with cleaned_up() as interruption, ExitStack() as stack:
        with signals_noted() as early:  # they leave a result even while this is imported
            from loadtest.cli.measure import Measurement

            test = Measurement(typed, stack, early, is_series=bool(search or sweep))
        if search or sweep:
            return _end(
                test.report_series(rounds, tolerance, sweep or ()), interruption, typed["strict"]
            )
        return _end(test.report(), interruption, typed["strict"])


loadtest.params += REQUEST_OPTIONS
loadtest.add_command(compare)


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
