"""The study of endurance: what becomes of latency, memory and work under a load that goes on.

`taskset -c 1 python -m loadtest.lab soak packages/dates --server-cores 0 --minutes 30 --rate 117
--out loadtest/results/soak`

An open loop with Poisson arrivals keeps to a rate; the share of the time for which it keeps the
server's processors busy is told, and not a share of the rate that a closed loop reaches: requests
that run together cost less than those that come one by one. Drift is the p99 of the last third of
the time by the p99 of its first third; its interval is that of a bootstrap over blocks of time, for
neighbours share a queue.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
from scipy.stats import bootstrap

from engine.package.package import read_manifest
from loadtest.arrival.arrival import OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.lab.overload import prompts
from loadtest.lab.process_tree import read_tree
from loadtest.lab.result import write_result
from loadtest.lab.serve import served
from loadtest.metrics import Distribution, RequestRecord, Window, distribution, due_in
from loadtest.runner import Course, run
from loadtest.work.ask import texts

_NUM_PARTS, _NUM_BLOCKS, _RESAMPLES = 6, 30, 1000  # parts of the time, blocks of a third of it

Seconds = dict[str, float]  # processor time, by the name of a process


@dataclass(frozen=True)
class Part:
    """A part of the time."""

    begin: float  # seconds since the open loop began
    end: float
    num_failed: int
    end_to_end: Distribution | None
    time_to_first_token: Distribution | None
    memory: int  # bytes, of all processes of the server at the end of it
    processor_seconds: float  # a request, of all processes of the server
    of_processes: Seconds  # the same of each
    busy: float  # share of the time of the server's processors


@dataclass(frozen=True)
class Drift:
    """The p99 of the last third by that of the first, and where it lies with 95 %."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Soak:
    """Results of a load that went on."""

    rate: float  # requests a second
    memory_before: int  # bytes, of all processes of the server when the first part begins
    parts: tuple[Part, ...]
    drift: Drift  # in end-to-end latency
    drift_of_first_token: Drift
    errors: dict[str, int]  # the whole open loop's
    own: str  # how busy the load test itself was
    invalid: tuple[str, ...]  # why the figures are not those of the server


class Uses:
    """Resource use of all processes of a server, read when each part begins and ends."""

    def __init__(self, pid: int, times: Sequence[float]) -> None:
        self._pid = pid
        self._times = times
        self._started: float | None = None
        self.seen: list[tuple[int, Seconds]] = []  # bytes of memory, and processor time

    def __call__(self, course: Course) -> None:
        """Read once a time has come; a load test calls twice a second from its beginning."""
        self._started = self._started or time.monotonic()
        elapsed, number = time.monotonic() - self._started, len(self.seen)
        if number < len(self._times) and elapsed >= self._times[number]:
            self.read()

    def end(self) -> None:
        """Read what is missing: the last request was due before the time was over."""
        while len(self.seen) < len(self._times):
            self.read()

    def read(self) -> None:
        """Read now."""
        uses = read_tree(self._pid).values()
        seconds = dict.fromkeys((use.name for use in uses), 0.0)
        for use in uses:
            seconds[use.name] += use.processor_seconds
        self.seen.append((sum(use.memory for use in uses), seconds))


def measure_soak(
    address: str, model: str, pid: int, *, cores: int, minutes: float, rate: float, warmup: float
) -> Soak:
    """Measure a server on so many cores, of which `pid` is the first process."""
    edges = (warmup + np.linspace(0, minutes * 60, _NUM_PARTS + 1)).tolist()
    uses = Uses(pid, edges)
    config = LoadConfig(address, model, OpenLoop(Rates((rate,))), duration=edges[-1], warmup=warmup)
    report = run(config, texts(prompts(seed=2)), uses)
    uses.end()
    records, window = report.records, report.window
    good = [record for record in records if record.ok]
    return Soak(
        rate=rate,
        memory_before=uses.seen[0][0],
        parts=tuple(parts_of(records, edges, uses.seen, cores)),
        drift=drift_of(((r.scheduled, r.end_to_end) for r in good), window),
        drift_of_first_token=drift_of(((r.scheduled, r.time_to_first_token) for r in good), window),
        errors=dict(Counter(record.error for record in records if not record.ok)),
        own=str(report.own),
        invalid=report.invalid,
    )


def parts_of(
    records: Sequence[RequestRecord],
    edges: Sequence[float],
    seen: Sequence[tuple[int, Seconds]],
    cores: int,
) -> Iterator[Part]:
    """Yield the parts between edges, at which memory and processor time of cores were seen."""
    for (begin, end), (before, after) in zip(pairwise(edges), pairwise(seen), strict=True):
        due = due_in(records, Window(begin, end))
        good = [record for record in due if record.ok]
        spent = _spent(before[1], after[1])
        yield Part(
            begin=begin,
            end=end,
            num_failed=len(due) - len(good),
            end_to_end=distribution(record.end_to_end for record in good),
            time_to_first_token=distribution(record.time_to_first_token for record in good),
            memory=after[0],
            processor_seconds=sum(spent.values()) / max(1, len(due)),
            of_processes={name: used / max(1, len(due)) for name, used in spent.items()},
            busy=sum(spent.values()) / (end - begin) / cores,
        )


def _spent(before: Seconds, after: Seconds) -> Seconds:
    return {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


def drift_of(latencies: Iterable[tuple[float, float | None]], window: Window) -> Drift:
    """Return the drift of latencies, each with the time at which its request was due."""
    at, values = np.array([one for one in latencies if one[1] is not None]).reshape(-1, 2).T
    edges = np.linspace(window.start, window.end, 3 * _NUM_BLOCKS + 1)
    blocks = [values[(begin <= at) & (at < end)] for begin, end in pairwise(edges)]
    blocks = [block for block in blocks if block.size]
    if len(blocks) < 3:
        raise LoadTestError("there are too few answers to tell a drift; ask for longer")

    def p99(chosen: Iterable[int]) -> float:
        return float(np.percentile(np.concatenate([blocks[one] for one in chosen]), 99))

    def ratio(first: Iterable[int], last: Iterable[int]) -> float:
        return p99(last) / p99(first)

    number = range(len(blocks))
    thirds = (number[: len(blocks) // 3], number[-(len(blocks) // 3) :])
    interval = bootstrap(
        thirds,
        ratio,
        n_resamples=_RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Drift(ratio(thirds[0], thirds[1]), float(interval.low), float(interval.high))


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30, show_default=True)
@click.option("--rate", type=float, required=True, help="Requests a second.")
@click.option("--warmup", type=float, default=60, show_default=True, help="Seconds before.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--server-cores",
    metavar="LIST",
    help="Cores of the server, as taskset takes them; all by default.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    minutes: float,
    rate: float,
    warmup: float,
    replicas: int,
    server_cores: str | None,
    out: Path,
) -> None:
    """Serve PACKAGE, which takes dates, as a user does, load it for long, and write OUT.json."""
    with served(package, "", replicas, cores=server_cores) as server:
        soak = measure_soak(
            server.address,
            read_manifest(package).name,
            server.pid,
            cores=len(os.sched_getaffinity(server.pid)),
            minutes=minutes,
            rate=rate,
            warmup=warmup,
        )
    _tell(soak)
    write_result(asdict(soak), out)


def _tell(soak: Soak) -> None:
    click.echo(
        f"{soak.rate:.1f} requests/s; memory was {soak.memory_before / 1e6:.1f} MB at the beginning"
    )
    for part in soak.parts:
        latency = part.end_to_end
        took = f"p50 {latency.p50:.4f} s, p99 {latency.p99:.4f} s" if latency else "no answer"
        click.echo(
            f"{part.begin:5.0f} to {part.end:.0f} s: {took}, {part.num_failed} failed, "
            f"{part.memory / 1e6:.1f} MB, {part.processor_seconds * 1000:.2f} ms of processor time "
            f"each, busy {part.busy:.2f} of the time"
        )
    for name, drift in (("end to end", soak.drift), ("TTFT", soak.drift_of_first_token)):
        click.echo(f"{name}: p99 {drift.ratio:.3f} times ({drift.low:.3f} to {drift.high:.3f})")
    for reason in soak.invalid:
        click.echo(f"not valid: {reason}")
