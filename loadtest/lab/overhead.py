"""The study of overhead: what a token and a request cost outside of the model.

`python -m loadtest.lab overhead --out loadtest/results/overhead`

The model computes nothing. It is called behind a worker, then behind a worker and a gateway; each
of them and the client has a process. Counted is processor time, so what else the machine does
changes little. The same requests are made with short and with long outputs: the difference is what
tokens cost, the rest what requests cost.

Deltas are joined by 16 tokens, or each token is a message. For that a step waits so long that its
messages have gone before the next one has others: if not, they would be fewer.

Behind a worker and a gateway it also tells how much later than from the engine a client has the
first token: with one stream, and with 16 streams of a `--package` that takes dates.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import click
import uvloop

from loadtest.lab.first_token import FirstToken, measure_first_token
from loadtest.lab.overhead_stages import STAGES, Do, Used, Work, served
from loadtest.lab.result import write_result
from server.cli.options import read_numbers

_SHORT = 16  # tokens of an output
_LEAST_REQUESTS = 32  # per measurement
_FIRST_OF_ONE, _FIRST_OF_MANY, _MANY = 200, 960, 16  # requests, requests, streams


class Deltas(NamedTuple):
    """How tokens become messages."""

    tokens_per_message: int
    long: int  # tokens of an output
    seconds_a_row: float  # a step of the model


_DELTAS = {
    "joined": Deltas(16, 16 + 128, 0.00002),
    "one by one": Deltas(1, 16 + 32, 0.0003),
}


class Cost(NamedTuple):
    """Costs of one process, in microseconds of processor time."""

    token: float
    message: float  # time of the tokens, by messages
    request: float  # without its tokens


@dataclass(frozen=True)
class Overhead:
    """Costs of one stage with so many streams."""

    stage: str
    deltas: str
    num_streams: int
    tokens_per_message: float
    costs: Mapping[str, Cost]  # by process, medians


def costs_of(short: Used, long: Used, num_requests: int) -> dict[str, Cost]:
    """Return what every process takes, from the same requests with short and with long outputs."""
    tokens, messages = long.num_tokens - short.num_tokens, long.num_messages - short.num_messages
    found = {}
    for process, seconds in short.processor.items():
        more = long.processor[process] - seconds
        rest = seconds - more * short.num_tokens / tokens
        found[process] = Cost(1e6 * more / tokens, 1e6 * more / messages, 1e6 * rest / num_requests)
    return found


async def measure_overhead(
    stage: str, deltas: str, counts: Sequence[int], num_rounds: int
) -> list[Overhead]:
    """Measure a stage with these numbers of streams, in turns; the first round warms up."""
    how = _DELTAS[deltas]
    rounds: dict[int, list[tuple[Used, Used]]] = {count: [] for count in counts}
    async with served(stage, max(counts), how.seconds_a_row) as do:
        for _ in range(num_rounds + 1):
            for count in counts:
                rounds[count].append(await _short_and_long(do, count, how))
    return [_overhead(stage, deltas, count, found[1:]) for count, found in rounds.items()]


async def _short_and_long(do: Do, num_streams: int, how: Deltas) -> tuple[Used, Used]:
    work = Work(num_streams, _num_requests(num_streams), _SHORT, how.tokens_per_message)
    return await do(work), await do(work._replace(num_tokens=how.long))


def _num_requests(num_streams: int) -> int:
    return max(num_streams, _LEAST_REQUESTS)


def _overhead(
    stage: str, deltas: str, num_streams: int, rounds: Sequence[tuple[Used, Used]]
) -> Overhead:
    found = [costs_of(short, long, _num_requests(num_streams)) for short, long in rounds]
    medians = {
        process: Cost(*map(statistics.median, zip(*(one[process] for one in found), strict=True)))
        for process in found[0]
    }
    _, long = rounds[-1]
    return Overhead(stage, deltas, num_streams, long.num_tokens / long.num_messages, medians)


@click.command()
@click.option(
    "--streams", default="1,32,256", show_default=True, callback=read_numbers, metavar="COUNT,..."
)
@click.option(
    "--rounds",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Rounds of counting; 0: first tokens alone are measured.",
)
@click.option(
    "--package",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="One that takes dates: its first tokens are measured too.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(streams: tuple[int, ...], rounds: int, package: Path | None, out: Path) -> None:
    """Measure what tokens and requests cost outside of the model, and write OUT.json."""
    overheads: list[Overhead] = []
    for stage in STAGES if rounds else ():
        for deltas in _DELTAS:
            found = uvloop.run(measure_overhead(stage, deltas, streams, rounds))
            overheads += found
            _tell(found)
    first = [one for name in STAGES for one in _first_tokens(package, name)]
    _tell_first_tokens(first)
    write_result(_document(overheads, first), out)


def _first_tokens(package: Path | None, stage: str) -> list[FirstToken]:
    found = [measure_first_token(None, 1, _FIRST_OF_ONE, stage)]
    if package is not None:
        found.append(measure_first_token(package, _MANY, _FIRST_OF_MANY, stage))
    return found


def _document(overheads: Sequence[Overhead], first: Sequence[FirstToken]) -> dict[str, object]:
    return {
        "unit": "microseconds of processor time",
        "overheads": [
            {**asdict(one), "costs": {name: cost._asdict() for name, cost in one.costs.items()}}
            for one in overheads
        ],
        "first_token_milliseconds": [asdict(one) for one in first],
    }


def _tell(overheads: Sequence[Overhead]) -> None:
    for one in overheads:
        costs = "; ".join(
            f"{process} {cost.token:.1f} us a token, {cost.message:.1f} a message, "
            f"{cost.request:.0f} a request"
            for process, cost in one.costs.items()
        )
        click.echo(
            f"{one.stage}, {one.num_streams} streams, {one.deltas} "
            f"({one.tokens_per_message:.1f} tokens a message): {costs}"
        )


def _tell_first_tokens(first: Sequence[FirstToken]) -> None:
    for one in first:
        click.echo(
            f"{one.stage}, {one.num_streams} streams, {one.model}: first token {one.added:.1f} ms "
            f"later than from the engine ({one.added_p90:.1f} at p90): {one.client:.1f} and "
            f"{one.engine:.1f}"
        )
