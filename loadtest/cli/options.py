"""The options of `tokenweir loadtest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
from click.core import ParameterSource

from loadtest.errors import LoadTestError
from server.cli.calls.generation_options import request_options
from server.cli.calls.server_options import server_option
from server.cli.options import Decorator, Number, Parsed, existing_file, timeout_option


def _parsed(name: str, function: str) -> Parsed:
    """Return a value that a function of the load test reads; its LoadTestError is wrong usage.

    It is given as module:function, imported when there is a value: not every install has it.
    """

    def parse(text: str) -> Any:
        try:
            return resolve_name(function)(text)
        except LoadTestError as error:
            raise ValueError(str(error)) from error

    return Parsed(name, parse)


def _range(text: str) -> tuple[int, int]:
    """Return the first and the last of a range of token ids."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < 2**31):
        raise ValueError(f"{text[:100]!r} is not a range of token ids, such as 100-999")
    return int(low), int(high)


_WORK = (
    click.option(
        "--prompts",
        type=existing_file,
        help="A prompt a line; .jsonl: requests with options, times, sessions, answers; for a "
        "model of images, their paths.  [default: what suits the model]",
    ),
    click.option(
        "--input-tokens",
        type=_parsed("lengths", "loadtest.work.lengths:parse_lengths"),
        metavar="LENGTHS",
        help="Prompts of drawn token ids: 128, 64-256, lognormal:180,0.6, @histogram.json.",
    ),
    click.option(
        "--output-tokens",
        type=_parsed("lengths", "loadtest.work.lengths:parse_lengths"),
        metavar="LENGTHS",
        help="Exact length of each answer, whatever the model says.",
    ),
    click.option(
        "--token-ids",
        type=Parsed("range", _range),
        default="100-999",
        show_default=True,
        metavar="LOW-HIGH",
        help="Token ids of drawn prompts.",
    ),
    click.option(
        "--method",
        type=click.Choice(["generate", "score", "classify", "label", "embed"]),
        help="Call of each request.  [default: the first that the model has]",
    ),
    click.option(
        "--option",
        "options",
        type=_parsed("option", "loadtest.work.mix:parse_option"),
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other option of the Python client, for each call; may be repeated.",
    ),
    click.option(
        "--mix",
        type=_parsed("kind", "loadtest.work.mix:parse_kind"),
        multiple=True,
        metavar="KIND",
        help="A kind of requests, to be repeated: '70 short max_new_tokens=8' '20 beam beam=4' "
        "'10 score method=score target=x'.",
    ),
    click.option(
        "--turns",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Requests of a session; each prompt is the last answer.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of everything random."
    ),
)
# As `tokenweir generate` has them; a seed that all requests have is an --option.
REQUEST_OPTIONS = request_options(without=["seed"])


def _left_out(name: str, when: str) -> Decorator:
    """Return the option of a time whose requests are measured by nobody."""
    return click.option(
        name,
        type=Number(min=0),
        default=0.0,
        metavar="SECONDS",
        help=f"{when}, left out of all figures.",
    )


_ARRIVAL = (
    click.option(
        "--requests",
        type=click.IntRange(1),
        help="The end of the test.  [default: 200, without --duration]",
    ),
    click.option(
        "--duration",
        type=Number(min=0, min_open=True),
        metavar="SECONDS",
        help="Length of the test.",
    ),
    _left_out("--warmup", "At the beginning"),
    _left_out("--cooldown", "At the end of --duration"),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        help="Closed loop: so many streams at any time.  [default: 8, without --rate]",
    ),
    click.option(
        "--rate",
        type=_parsed("rate", "loadtest.arrival.rates:parse_rates"),
        metavar="PER_SECOND",
        help="Open loop: requests start at this rate whatever the server does; a ramp 10-100, "
        "steps 10,20,40.",
    ),
    click.option(
        "--arrival",
        type=click.Choice(["poisson", "constant", "gamma", "trace"]),
        default="poisson",
        show_default=True,
        help="Pattern of the open loop; trace: the times of --prompts.",
    ),
    click.option(
        "--burstiness",
        type=Number(min=0, min_open=True),
        default=1.0,
        show_default=True,
        metavar="SHAPE",
        help="Shape of gamma arrivals: 1 is Poisson, less comes in bursts.",
    ),
    click.option(
        "--trace-speed",
        type=Number(min=0, min_open=True),
        default=1.0,
        show_default=True,
        metavar="TIMES",
        help="2: a trace in half its time.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="Number of client processes.",
    ),
    timeout_option,
    server_option,
    click.option(
        "--admin",
        metavar="HOST:PORT",
        help="The server's admin port, which reports its load.",
    ),
    click.option(
        "--admin-token",
        envvar="TOKENWEIR_ADMIN_TOKEN",
        show_envvar=True,
        metavar="TOKEN",
        help="Token of an operator, for --admin.",
    ),
)

_GOALS = (
    click.option(
        "--slo",
        metavar="BOUNDS",
        help="Such as ttft=200ms,tpot=50ms,e2e=2s; exit with 1 if missed.",
    ),
    click.option(
        "--percentile",
        type=Number(min=0, min_open=True, max=100),
        default=99.0,
        show_default=True,
        help="Share of requests (in %) that must meet each SLO; failed ones count as missed.",
    ),
    click.option(
        "--verify",
        type=Number(min=0, max=1),
        default=0.0,
        metavar="SHARE",
        help="Share of answers that are asked again alone and compared bit for bit.",
    ),
    click.option(
        "--expect",
        type=existing_file,
        metavar="FILE",
        help="JSONL of requests with their answers, as --answers writes it.",
    ),
)


def load_test_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of work, arrival and goals."""
    for decorate in reversed((*_WORK, *_ARRIVAL, *_GOALS)):
        command = decorate(command)
    return command


def refuse_unused(context: click.Context, typed: dict[str, Any]) -> None:
    """Raise UsageError for an option that was typed and would change nothing."""
    is_open = bool(typed["rate"] or typed["search"] or typed["sweep"])
    prompts: Path | None = typed["prompts"]
    draws = typed["input_tokens"] is not None or (prompts and prompts.suffix == ".jsonl")
    needs = {
        "arrival": (is_open or typed["arrival"] == "trace", "--rate, --sweep or --search"),
        "burstiness": (typed["arrival"] == "gamma", "--arrival gamma"),
        "trace_speed": (typed["arrival"] == "trace", "--arrival trace"),
        "percentile": (typed["slo"], "--slo"),
        "token_ids": (draws, "--input-tokens"),
        "rounds": (typed["search"], "--search"),
        "tolerance": (typed["search"], "--search"),
    }
    for name, (is_used, needed) in needs.items():
        if not is_used and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} needs {needed}; give that too, or leave it out")
