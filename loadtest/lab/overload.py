"""The study of overload: one tenant beside another's flood, and answers in time at too high a rate.

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
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.arrival.arrival import ClosedLoop, OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.lab.light_sender import LightLoop, LightSender
from loadtest.lab.result import write_result
from loadtest.metrics import Distribution, OwnLoad
from loadtest.runner import run
from loadtest.work.ask import texts

_MONTHS = (
    "january february march april may june july august september october november december"
).split()
_SETTLE = 15.0  # seconds; a gateway remembers tenants for a while, and then one alone has all
_WARM_UP = 300  # requests
_OUTPUT = pb.Output(token_ids=True)  # as the client asks by itself
_METHOD = "/tokenweir.v1.GenerationService/GenerateStream"
_PATIENCE = 60.0  # seconds, the deadline in a closed loop: nobody is late there
_FLOOD = """
import sys
from loadtest.lab.overload import flood
flood(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@dataclass(frozen=True)
class Fairness:
    """Latencies of a tenant that sends one request after the other."""

    idle: Distribution  # nobody else is there
    flooded: Distribution  # another tenant keeps `num_flooding` streams going
    num_flooding: int

    @property
    def ratio_p50(self) -> float:
        return self.flooded.p50 / self.idle.p50

    @property
    def ratio_p99(self) -> float:
        return self.flooded.p99 / self.idle.p99


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


def flood(address: str, model: str, concurrency: int) -> None:
    """Keep so many streams of one tenant going, until the process ends."""
    config = LoadConfig(address, model, ClosedLoop(concurrency), num_requests=10**6)
    run(config, texts(prompts(1), tenant="flood"))


def measure_fairness(address: str, model: str, num_flooding: int, num_requests: int) -> Fairness:
    """Measure a tenant alone, then beside a flood from a process of its own."""
    _one_by_one(address, model, num_requests, seed=2)  # warms the server up
    idle = _one_by_one(address, model, num_requests, seed=3)
    with _flooding(address, model, num_flooding):
        _one_by_one(address, model, max(1, num_requests // 4), seed=4)  # until the flood is there
        flooded = _one_by_one(address, model, num_requests, seed=5)
    return Fairness(idle, flooded, num_flooding)


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
    """Raise ClickException if more rounds than `most` do not count."""
    if len(invalid) > most:
        raise click.ClickException(
            f"the load test itself was the limit in {len(invalid)} rounds, in the last one "
            f"with {invalid[-1].own}; give it a core of its own, or offer less (--times)"
        )


def _requests(model: str, seed: int, count: int) -> list[bytes]:
    """Return requests as the client makes them, each with an id of its own."""
    dates = itertools.islice(itertools.cycle(prompts(seed)), count)
    return [_request(model, date, f"{uuid.uuid4()}") for date in dates]


def _request(model: str, text: str, request_id: str) -> bytes:
    request = pb.GenerateRequest(
        model=model, inputs=[pb.Input(text=text)], request_id=request_id, output=_OUTPUT
    )
    data: bytes = pb.GenerateStreamRequest(request=request).SerializeToString()
    return data


def _answered_a_second(loop: LightLoop, timeout: float, seconds: float) -> float:
    answered = sum(
        call.ok and call.end_to_end <= timeout <= call.finished <= seconds for call in loop.calls
    )
    return answered / (seconds - timeout)


def _one_by_one(address: str, model: str, num_requests: int, seed: int) -> Distribution:
    config = LoadConfig(address, model, ClosedLoop(1), num_requests=num_requests)
    try:
        latency = run(config, texts(prompts(seed), tenant="other")).summary.end_to_end
    except LoadTestError as error:
        raise click.ClickException(f"{error}") from error
    if latency is None:
        raise click.ClickException(f"no request of {num_requests} was answered by {address}")
    return latency


@contextmanager
def _flooding(address: str, model: str, concurrency: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _FLOOD, address, model, str(concurrency)])
    try:
        yield
        if process.poll() is not None:
            raise click.ClickException("the flood has ended before the measurement")
    finally:
        process.kill()
        process.wait()


@click.command()
@click.argument("model")
@click.option("--address", default="127.0.0.1:50051", show_default=True)
@click.option("--flood", "num_flooding", type=click.IntRange(1), default=300, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
@click.option("--times", type=float, default=4.0, show_default=True, help="Of the capacity.")
@click.option("--timeout", type=float, default=1.0, show_default=True, help="Seconds.")
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True)
@click.option("--seconds", type=float, default=6.0, show_default=True, help="Of every loop.")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    model: str,
    address: str,
    num_flooding: int,
    requests: int,
    times: float,
    timeout: float,
    concurrency: int,
    seconds: float,
    rounds: int,
    out: Path,
) -> None:
    """Ask the server for MODEL, which takes dates, and write OUT.json."""
    fairness = measure_fairness(address, model, num_flooding, requests)
    click.echo(
        f"beside {num_flooding} streams of another tenant: p50 {fairness.ratio_p50:.1f} times, "
        f"p99 {fairness.ratio_p99:.1f} times that of an idle server"
    )
    time.sleep(_SETTLE)
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
    write_result(_document(fairness, goodput), out)


def _document(fairness: Fairness, goodput: Goodput) -> dict[str, object]:
    return {
        "fairness": {
            **asdict(fairness),
            "ratio_p50": fairness.ratio_p50,
            "ratio_p99": fairness.ratio_p99,
        },
        "goodput": {"share": goodput.share, "shares": goodput.shares, **asdict(goodput)},
    }


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
