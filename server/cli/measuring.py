"""The command that measures a running server."""

from __future__ import annotations

from pathlib import Path

import click

from server.cli.options import (
    any_path,
    examples,
    existing_file,
    model_option,
    server_option,
    timeout_option,
)


@click.command(
    short_help="Measure latencies and throughput of a server.",
    epilog=examples(
        "tokenweir loadtest --model dates --concurrency 16 --requests 500",
        "tokenweir loadtest --model dates --rate 50 --arrival poisson --requests 1000 "
        "--json run.json --png run.png",
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
    type=click.FloatRange(min=0, min_open=True),
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
@click.option("--prompts", type=existing_file, help="UTF-8 text, a prompt a line.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Of each request.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and prompts.")
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
@click.option("--png", "png_file", type=any_path, help="Draw the latency distributions here.")
@timeout_option
@server_option
def loadtest(**options: object) -> None:
    """Stream many requests and print latencies, throughput and errors.

    Latencies count from the time a request was due, so a server that falls behind cannot hide it:
    TTFT (first token), ITL (between tokens), TPOT (per token of a request), end to end.
    """
    raise NotImplementedError
