"""The study of batching: throughput at equal p99 latency, continuous against static.

`python -m loadtest.lab batching packages/gpt2 --out loadtest/results/batching-gpt2`
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
from matplotlib.figure import Figure

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.manifest import GenerationContract
from engine.package.package import load_package
from loadtest.benchmark.work import generation_contract
from loadtest.lab.arrivals import Policy, TraceWork, draw_trace, serve_trace
from loadtest.lab.result import write_result
from loadtest.metrics import distribution
from loadtest.reports.plots import write_figure

POLICIES: tuple[Policy, ...] = ("continuous", "static", "early exit")
_COLOURS = {"continuous": "#0072b2", "static": "#d55e00", "early exit": "#cc79a7"}


@dataclass(frozen=True)
class Point:
    """One policy at one rate of arrivals."""

    policy: Policy
    rate: float  # requests a second, offered
    throughput: float  # requests a second, from the first arrival to the last end
    tokens_per_second: float
    p50: float  # seconds from arrival to end
    p99: float
    latencies: tuple[float, ...]


def throughput_within(points: Sequence[Point], policy: Policy, p99: float) -> float:
    """Return the largest rate at which this p99 is kept, between two measured rates by the line."""
    own = sorted((p for p in points if p.policy == policy), key=lambda p: p.rate)
    best = 0.0
    for one, other in itertools.pairwise(own):
        if one.p99 <= p99 < other.p99:
            share = (math.log(p99) - math.log(one.p99)) / (math.log(other.p99) - math.log(one.p99))
            best = max(best, one.throughput + share * (other.throughput - one.throughput))
    return max([best, *(p.throughput for p in own if p.p99 <= p99)])


class AtEqualP99(NamedTuple):
    """The rate of continuous batching within a p99 that another policy has."""

    policy: Policy  # the other
    p99: float  # seconds
    continuous: float  # requests a second
    other: float
    ratio: float


def at_equal_p99(points: Sequence[Point]) -> list[AtEqualP99]:
    """Compare at every p99 that a policy which is not continuous has."""
    limits = sorted((p.policy, p.p99) for p in points if p.policy != "continuous")
    found = []
    for policy, p99 in limits:
        own, other = (throughput_within(points, one, p99) for one in ("continuous", policy))
        found.append(AtEqualP99(policy, p99, own, other, own / other))
    return found


@click.command()
@click.argument("package", type=click.Path(exists=True, path_type=Path))
@click.option("--rates", default="0.5,1,2,3,4,6,8", show_default=True, metavar="PER_SECOND,...")
@click.option("--requests", type=click.IntRange(2), default=200, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--mean-new-tokens", type=float, default=48.0, show_default=True)
@click.option("--slots", type=click.IntRange(1), default=32, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Writes OUT.json, .png")
def main(
    package: Path,
    rates: str,
    requests: int,
    prompt_tokens: int,
    mean_new_tokens: float,
    slots: int,
    seed: int,
    out: Path,
) -> None:
    """Offer PACKAGE requests at several rates under every policy, the same ones to all."""
    loaded = load_package(package)
    contract = generation_contract(loaded)
    used = 1 if contract.cross_cache else prompt_tokens
    work = TraceWork(
        num_requests=requests,
        num_prompt_tokens=prompt_tokens,
        mean_new_tokens=mean_new_tokens,
        max_new_tokens=min(int(6 * mean_new_tokens), contract.cache.max_len - used),
        vocab_size=contract.vocab_size,
        seed=seed,
    )
    engine = load_engine(loaded, _config(work, contract, slots))
    assert isinstance(engine, AsyncEngine), "it has a generation contract"
    offered = [float(rate) for rate in rates.split(",")]
    about = {
        "model": loaded.manifest.name,
        "weights": loaded.manifest.weights,
        "trace": asdict(work),
        "slots": slots,
        "policies": inspect.getdoc(serve_trace),
    }

    def keep(points: Sequence[Point]) -> None:
        _write(out, points, about)

    points = asyncio.run(_measure(engine, offered, work, slots, keep))
    for found in at_equal_p99(points):
        click.echo(
            f"within p99 {found.p99:.2f} s: {found.continuous:.2f} requests/s, {found.policy} "
            f"{found.other:.2f}: {found.ratio:.2f} times"
        )


def _config(work: TraceWork, contract: GenerationContract, slots: int) -> EngineConfig:
    """Return the settings of an engine that refuses none of the requests."""
    return EngineConfig(
        max_num_seqs=slots,
        max_queue_size=work.num_requests,
        max_waiting_tokens=work.num_requests * (work.num_prompt_tokens + contract.cache.max_len),
    )


async def _measure(
    engine: AsyncEngine,
    rates: Sequence[float],
    work: TraceWork,
    slots: int,
    keep: Callable[[Sequence[Point]], None],
) -> list[Point]:
    points: list[Point] = []
    await engine.start()
    try:
        warm_up = replace(work, num_requests=slots, mean_new_tokens=4.0, seed=work.seed + 1)
        await serve_trace(engine, draw_trace(1000.0, warm_up), "continuous", max_batch=slots)
        for rate in rates:
            for policy in POLICIES:  # beside each other: what disturbs the machine disturbs all
                points.append(await _point(engine, policy, rate, work, slots))
                click.echo(
                    f"{policy} at {rate:g}/s: {points[-1].throughput:.2f} requests/s, "
                    f"p99 {points[-1].p99:.2f} s"
                )
                keep(points)  # a study takes long: what was measured is not lost with the rest
    finally:
        await engine.stop()
    return points


async def _point(
    engine: AsyncEngine, policy: Policy, rate: float, work: TraceWork, slots: int
) -> Point:
    served = await serve_trace(engine, draw_trace(rate, work), policy, max_batch=slots)
    latencies = [one.ended - one.arrived for one in served]
    duration = max(one.ended for one in served) - min(one.arrived for one in served)
    spread = distribution(latencies)
    assert spread is not None, "a trace has requests"
    return Point(
        policy=policy,
        rate=rate,
        throughput=len(served) / duration,
        tokens_per_second=sum(one.num_new_tokens for one in served) / duration,
        p50=spread.p50,
        p99=spread.p99,
        latencies=tuple(latencies),
    )


def _write(out: Path, points: Sequence[Point], about: dict[str, object]) -> None:
    found = [one._asdict() for one in at_equal_p99(points)]
    content = {**about, "at_equal_p99": found, "points": [asdict(point) for point in points]}
    write_result(content, out)
    _draw(points, f"{about['model']}, {about['weights']}", out.with_suffix(".png"))


def _draw(points: Sequence[Point], name: str, path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.set_title(f"{name}: continuous and other batching", loc="left", fontweight="bold")
    for policy in POLICIES:
        own = [point for point in points if point.policy == policy]
        colour = _COLOURS[policy]
        rates = [point.throughput for point in own]
        axes.plot(rates, [p.p99 for p in own], "o-", color=colour, label=f"{policy}, p99")
        axes.plot(rates, [p.p50 for p in own], "o:", color=colour, label=f"{policy}, p50")
    axes.set_xlabel("requests answered per second")
    axes.set_ylabel("seconds from arrival to end")
    axes.set_yscale("log")
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False)
    write_figure(figure, path)
