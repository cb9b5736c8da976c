"""The options of `tokenweir loadtest`, and the settings and the work that they say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from server.cli.default_prompts import default_prompts
from server.cli.generation_options import client_options, request_options
from server.cli.options import Decorator, Number, existing_file, timeout_option
from server.cli.server_options import server_option

if TYPE_CHECKING:
    from loadtest.arrival.arrival import Arrival
    from loadtest.config import LoadConfig
    from loadtest.work.ask import Work

_DEFAULT_REQUESTS, _DEFAULT_CONCURRENCY, _DEFAULT_TRIAL = 200, 8, 10.0


class _Parsed(click.ParamType[Any]):
    """A value that a function of the load test reads; its LoadTestError is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what was typed as a value of the load test."""
        from loadtest.errors import LoadTestError

        try:
            return self._parse(value) if isinstance(value, str) else value
        except LoadTestError as error:
            self.fail(str(error), param, ctx)


def _rates(text: str) -> object:
    from loadtest.arrival.rates import parse_rates

    if text.strip("+-").lower() in ("nan", "inf", "infinity"):
        from loadtest.errors import LoadTestError

        raise LoadTestError(f"{text} is not a finite number.")
    return parse_rates(text)


def _lengths(text: str) -> object:
    from loadtest.work.lengths import parse_lengths

    return parse_lengths(text)


def _kind(text: str) -> object:
    from loadtest.work.mix import parse_kind

    return parse_kind(text)


def _option(text: str) -> object:
    from loadtest.work.mix import parse_option

    return parse_option(text)


def _token_ids(text: str) -> tuple[int, int]:
    from loadtest.errors import LoadTestError

    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < 2**31):
        raise LoadTestError(f"{text[:100]!r} is not a range of token ids, such as 100-999")
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
        type=_Parsed("lengths", _lengths),
        metavar="LENGTHS",
        help="Prompts of drawn token ids: 128, 64-256, lognormal:180,0.6, @histogram.json.",
    ),
    click.option(
        "--output-tokens",
        type=_Parsed("lengths", _lengths),
        metavar="LENGTHS",
        help="Exact length of each answer, whatever the model says.",
    ),
    click.option(
        "--token-ids",
        type=_Parsed("range", _token_ids),
        default="100-999",
        show_default=True,
        metavar="LOW-HIGH",
        help="That prompts are drawn from.",
    ),
    click.option(
        "--method",
        type=click.Choice(["generate", "score", "classify", "label", "embed"]),
        help="Call of each request.  [default: the first that the model has]",
    ),
    click.option(
        "--option",
        "options",
        type=_Parsed("option", _option),
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other of each call, as the Python client has it; may be repeated.",
    ),
    click.option(
        "--mix",
        type=_Parsed("kind", _kind),
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
        help="Of a session: the next prompt is the last answer.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of all that is drawn."),
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
        help=f"{when}, in no figure.",
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
        help="In which requests are due.",
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
        type=_Parsed("rate", _rates),
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
        help="Of gamma arrivals: 1 is Poisson, less comes in bursts.",
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
        help="That send, where one is not enough.",
    ),
    timeout_option,
    server_option,
    click.option(
        "--admin",
        metavar="HOST:PORT",
        help="The server's admin port, which says how busy it is.",
    ),
    click.option(
        "--admin-token",
        envvar="TOKENWEIR_ADMIN_TOKEN",
        show_envvar=True,
        metavar="TOKEN",
        help="Of an operator, for --admin.",
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
        help="Of the requests, failed ones too, that keeps each bound.",
    ),
    click.option(
        "--verify",
        type=Number(min=0, max=1),
        default=0.0,
        metavar="SHARE",
        help="Of the answers, asked again alone and compared bit for bit.",
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


def work_of(typed: dict[str, Any], stack: ExitStack) -> Work:
    """Return what is asked, until the stack ends; LoadTestError for files that cannot be used."""
    from loadtest.work.common import Common
    from loadtest.work.expecting import expecting
    from loadtest.work.mix import Mix
    from loadtest.work.requests_file import read_requests

    named = client_options({str(one.name): typed[str(one.name)] for one in REQUEST_OPTIONS})
    options = {**named, **dict(typed["options"])}
    lengths, seed = typed["output_tokens"], typed["seed"]
    prompts, method = _prompts(typed, stack), typed["method"]
    work: Work = Common(prompts, options, method, typed["turns"], lengths, seed)
    if typed["mix"]:
        names = [kind.name for kind in typed["mix"]]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise click.UsageError(f"two kinds of --mix are called {twice[0]!r}; rename one")
        work = Mix(work, typed["mix"], seed)
    if (path := typed["expect"]) is not None:
        work = expecting(work, read_requests(path, typed["token_ids"]).asks, path.name)
    return work


def _prompts(typed: dict[str, Any], stack: ExitStack) -> Work:
    from loadtest.work.ask import texts
    from loadtest.work.requests_file import read_requests
    from loadtest.work.synthetic import Synthetic
    from loadtest.work.texts_file import read_lines

    path: Path | None = typed["prompts"]
    if typed["input_tokens"] is not None:
        if path is not None:
            raise click.UsageError("--prompts and --input-tokens both say what is asked; give one")
        return Synthetic(typed["input_tokens"], typed["token_ids"], typed["seed"])
    if path is None:
        return stack.enter_context(default_prompts(typed["server"], typed["model"]))
    if path.suffix == ".jsonl":
        return read_requests(path, typed["token_ids"])
    return texts(read_lines(path))


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


def config_of(typed: dict[str, Any], *, keep_answers: bool, is_series: bool) -> LoadConfig:
    """Return the settings; UsageError or LoadTestError for what does not fit together."""
    from loadtest.config import LoadConfig
    from loadtest.goals import parse_slo

    arrival = _arrival(typed, is_series)
    requests, duration = typed["requests"], typed["duration"]
    slo = None if typed["slo"] is None else parse_slo(typed["slo"], typed["percentile"])
    if requests is None and duration is None and arrival.name != "trace":
        trial = max(_DEFAULT_TRIAL, slo.seconds_to_see if slo else 0.0)
        requests, duration = (None, trial) if is_series else (_DEFAULT_REQUESTS, None)
    return LoadConfig(
        address=typed["server"].address,
        model=typed["model"],
        arrival=arrival,
        num_requests=requests,
        duration=duration,
        warmup=typed["warmup"],
        cooldown=typed["cooldown"],
        seed=typed["seed"],
        timeout=typed["timeout"],
        slo=slo,
        verify=typed["verify"],
        keep_answers=keep_answers,
        num_processes=typed["processes"],
        admin_address=typed["admin"],
    )


def _arrival(typed: dict[str, Any], is_series: bool) -> Arrival:
    from loadtest.arrival.arrival import ClosedLoop, OpenLoop, Replay
    from loadtest.arrival.rates import Rates

    rates, concurrency = typed["rate"], typed["concurrency"]
    if concurrency is not None and (rates is not None or is_series):
        raise click.UsageError("give --rate for an open loop, or --concurrency for a closed one")
    if typed["arrival"] == "trace":
        if rates is not None or concurrency is not None or is_series:
            raise click.UsageError("a trace has its own times; leave out --rate and --concurrency")
        return Replay(typed["trace_speed"])
    if is_series and rates is not None and not rates.is_constant:
        raise click.UsageError(f"--rate {rates} is not one rate; give where a search begins")
    if rates is None and not is_series:
        return ClosedLoop(concurrency or _DEFAULT_CONCURRENCY)
    return OpenLoop(rates or Rates((1.0,)), typed["arrival"], typed["burstiness"])
