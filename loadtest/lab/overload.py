"""The study of overload: answers in time where far more is asked than can be answered.

`python -m loadtest.lab overload dates --out loadtest/results/overload-dates` asks a server that
runs. Server and load test want cores of their own, or each takes what the other is measured by:
`taskset -c 0 tokenweir serve packages/dates`, `taskset -c 1 python -m loadtest.lab overload`.
Closed loops and overload are sent by a LightSender, whose core would else be full of refusals.

The speed of a machine swings by a quarter within a minute. So closed loops and overload
take turns, every overload is held against the closed loops before and behind it, and the study
tells the median of all of them, the least and the largest: of six, the median of more of them would
lie between those with 97 %. A round whose sender was late itself shows nothing of the server: it
is kept and told, does not count, and another one is measured for it.

Answers to overload count from one timeout behind its beginning to its last call: before, no queue
stands yet, and behind, the rest of it is answered without the load.
"""

from __future__ import annotations

import itertools
import random
import statistics
import uuid
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.arrival.arrival import OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.errors import LoadTestError
from loadtest.lab.light_sender import LightLoop, LightSender
from loadtest.lab.result import write_result
from loadtest.metrics import OwnLoad

_MONTHS = (
    "january february march april may june july august september october november december"
).split()
_WARM_UP = 300  # requests
_OUTPUT = pb.Output(token_ids=True)  # as the client asks by itself
_METHOD = "/tokenweir.v1.GenerationService/GenerateStream"
_PATIENCE = 60.0  # seconds, the deadline in a closed loop: nobody is late there


@dataclass(frozen=True)
class Overload:
    """An open loop that offers too much, between two closed loops."""

    capacity: float  # requests a second of those closed loops, their mean
    offered: float  # requests a second
    answered: float  # requests a second, before their deadline
    errors: dict[str, int]
    own: OwnLoad  # the load test's own load meanwhile

    @property
    def share(self) -> float:
        return self.answered / self.capacity


@dataclass(frozen=True)
class Goodput:
    """Answers in time under overload, in one round after the other."""

    timeout: float  # seconds
    rounds: tuple[Overload, ...]
    invalid: tuple[Overload, ...] = ()  # the sender was the limit

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the closed loop's rate, in rising order."""
        return tuple(sorted(one.share for one in self.rounds))

    @property
    def share(self) -> float:
        return statistics.median(self.shares)


def prompts(seed: int) -> tuple[str, ...]:
    """Return dates in an order of their own: no cached source is met again."""
    dates = [
        f"{day} {month} {year}"
        for day, month, year in itertools.product(range(1, 29), _MONTHS, range(1950, 2050))
    ]
    random.Random(seed).shuffle(dates)
    return tuple(dates)


def measure_goodput(
    address: str,
    model: str,
    *,
    times: float,
    timeout: float,
    concurrency: int,
    seconds: float,
    num_rounds: int,
) -> Goodput:
    """Measure what a closed loop reaches, then offer so many times as much, in turns."""
    seeds = itertools.count(6)

    def closed(num_requests: int) -> float:
        requests = _requests(model, next(seeds), num_requests)
        with closing(LightSender(address, _METHOD, _PATIENCE)) as sender:
            return sender.closed_loop(requests, concurrency).answered_per_second

    def offer(rate: float) -> LightLoop:
        requests = _requests(model, next(seeds), int(rate * seconds))
        times = OpenLoop(Rates((rate,))).times(len(requests), None, seed=0).tolist()
        with closing(LightSender(address, _METHOD, timeout)) as sender:
            return sender.open_loop(requests, times)

    rounds: list[Overload] = []
    invalid: list[Overload] = []
    before = closed(_WARM_UP)
    before = closed(int(before * seconds))
    while len(rounds) < num_rounds:
        loop = offer(offered := times * before)
        behind = closed(int(before * seconds))
        answered = _answered_a_second(loop, timeout, seconds)
        errors = dict(Counter(call.error for call in loop.calls if not call.ok).most_common())
        one = Overload((before + behind) / 2, offered, answered, errors, loop.own)
        (invalid if loop.own.is_limit else rounds).append(one)
        _check_counts(invalid, num_rounds)
        before = behind
    return Goodput(timeout, tuple(rounds), tuple(invalid))


def _check_counts(invalid: list[Overload], most: int) -> None:
    """Raise LoadTestError if more rounds than `most` do not count."""
    if len(invalid) > most:
        raise LoadTestError(
            f"the load test itself was the limit in {len(invalid)} rounds, in the last one "
            f"with {invalid[-1].own}; give it a core of its own, or offer less (--times)"
        )


def _requests(model: str, seed: int, count: int) -> list[bytes]:
    """Return requests as the client makes them, each with an id of its own."""
    found: list[bytes] = []
    for date in itertools.islice(itertools.cycle(prompts(seed)), count):
        request = pb.GenerateRequest(
            model=model, inputs=[pb.Input(text=date)], request_id=f"{uuid.uuid4()}", output=_OUTPUT
        )
        found.append(pb.GenerateStreamRequest(request=request).SerializeToString())
    return found


def _answered_a_second(loop: LightLoop, timeout: float, seconds: float) -> float:
    answered = sum(
        call.ok and call.end_to_end <= timeout <= call.finished <= seconds for call in loop.calls
    )
    return answered / (seconds - timeout)


@click.command()
@click.argument("model")
@click.option("--address", default="127.0.0.1:50051", show_default=True)
@click.option(
    "--times",
    type=float,
    default=4.0,
    show_default=True,
    help="Load, as a multiple of the capacity.",
)
@click.option("--timeout", type=float, default=1.0, show_default=True, help="Seconds.")
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--seconds", type=float, default=6.0, show_default=True, help="Seconds of every loop."
)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    model: str,
    address: str,
    times: float,
    timeout: float,
    concurrency: int,
    seconds: float,
    rounds: int,
    out: Path,
) -> None:
    """Ask the server for MODEL, which takes dates, and write OUT.json."""
    goodput = measure_goodput(
        address,
        model,
        times=times,
        timeout=timeout,
        concurrency=concurrency,
        seconds=seconds,
        num_rounds=rounds,
    )
    _tell_goodput(goodput, times)
    content = {"share": goodput.share, "shares": goodput.shares, **asdict(goodput)}
    write_result({"goodput": content}, out)


def _tell_goodput(goodput: Goodput, times: float) -> None:
    least, most = goodput.shares[0], goodput.shares[-1]
    click.echo(
        f"offered {times:g} times what a closed loop reaches: {goodput.share:.2f} of that answered "
        f"within {goodput.timeout:g} s, the median of {len(goodput.rounds)} rounds "
        f"({least:.2f} to {most:.2f})"
    )
    for one in goodput.rounds:
        click.echo(f"  {one.answered:.0f}/s of {one.capacity:.0f}/s, {one.offered:.0f}/s offered")
    for one in goodput.invalid:
        click.echo(f"  does not count, for its sender was the limit: {one.own}")
