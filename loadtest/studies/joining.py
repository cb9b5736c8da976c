"""The study of joining: what it costs that prompts join a batch a chunk a step, and what it gives.

`python -m loadtest.studies.joining packages/gpt2-int8 --out loadtest/results/joining-gpt2-int8`

While sequences decode, a step reads one chunk of prompts at most, unless more requests wait for
their first token than sequences for their next one. Two engines get the same closed loops in turns:
one with chunks as engines have them, the other with chunks that fill a step, so that all prompts
that wait are read at once. No prompt is longer than a chunk.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import click

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import Package, load_package
from engine.requests.events import TextDelta
from engine.requests.request import GenerationRequest, SamplingParams
from loadtest.benchmark.work import generation_contract
from loadtest.studies.arrivals import Arrival, TraceWork, draw_trace, quantile
from loadtest.studies.heading import write_result

_ONE, _ALL = "one chunk", "all"
_CHUNK = EngineConfig().prefill_chunk_size
_IDS = count()


class Turn(NamedTuple):
    """Measurements of one closed loop."""

    processor: float  # seconds
    wall: float
    first_token: float  # milliseconds, median
    gap: float  # between two tokens of a stream, milliseconds, p99


Turns = Mapping[str, Sequence[Turn]]


def ratios(turns: Turns) -> dict[str, float]:
    """Return every figure of one chunk a step over that of all: the medians of the turns."""
    pairs = list(zip(turns[_ONE], turns[_ALL], strict=True))
    return {
        name: statistics.median(getattr(one, name) / getattr(other, name) for one, other in pairs)
        for name in Turn._fields
    }


async def measure(
    package: Package, num_streams: int, work: TraceWork, num_turns: int
) -> dict[str, list[Turn]]:
    """Let both engines answer closed loops in turns; the first turn warms up."""
    chunks = {_ONE: _CHUNK, _ALL: EngineConfig().max_num_batched_tokens}
    engines = {name: _engine(package, num_streams, size) for name, size in chunks.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.start()
    for number in range(num_turns + 1):
        requests = draw_trace(1.0, replace(work, seed=work.seed + number))
        for name in sorted(engines, reverse=bool(number % 2)):
            turns[name].append(await answer(engines[name], requests, num_streams))
    for engine in engines.values():
        await engine.stop()
    return {name: found[1:] for name, found in turns.items()}


async def answer(engine: AsyncEngine, requests: Sequence[Arrival], num_streams: int) -> Turn:
    """Let an engine answer requests, so many at once."""
    left = iter(requests)
    wall, processor = time.perf_counter(), time.process_time()

    async def stream() -> list[list[float]]:
        return [await _times(engine, one) for one in left]

    found = await asyncio.gather(*(stream() for _ in range(num_streams)))
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    times = [each for one in found for each in one]
    gaps = [later - earlier for each in times for earlier, later in pairwise(each[1:])]
    first = statistics.median(each[1] - each[0] for each in times)
    return Turn(processor, wall, 1e3 * first, 1e3 * quantile(gaps, 0.99))


def _engine(package: Package, num_streams: int, chunk_size: int) -> AsyncEngine:
    config = EngineConfig(
        max_num_seqs=num_streams,
        max_num_batched_tokens=EngineConfig().max_num_batched_tokens + num_streams,
        prefill_chunk_size=chunk_size,
        num_threads=1,
        reuse_prefixes=False,
    )
    engine = load_engine(package, config)
    assert isinstance(engine, AsyncEngine), "it has a generation contract"
    return engine


async def _times(engine: AsyncEngine, request: Arrival) -> list[float]:
    """Return when a request was made, and when each of its tokens came."""
    params = SamplingParams(max_new_tokens=request.num_new_tokens, ignore_eos=True)
    times = [time.perf_counter()]
    asked = GenerationRequest(f"joining-{next(_IDS)}", request.prompt, params)
    async for event in engine.generate(asked):
        if isinstance(event, TextDelta):
            times.append(time.perf_counter())
    return times


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--streams", type=click.IntRange(2), default=32, show_default=True)
@click.option("--requests", type=click.IntRange(2), default=96, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1, _CHUNK), default=64, show_default=True)
@click.option("--mean-new-tokens", type=float, default=24.0, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    streams: int,
    requests: int,
    prompt_tokens: int,
    mean_new_tokens: float,
    turns: int,
    out: Path,
) -> None:
    """Let PACKAGE answer closed loops with and without the rule, and write OUT.json."""
    loaded = load_package(package)
    contract = generation_contract(loaded)
    longest = contract.cache.max_len - (0 if contract.cross_cache else prompt_tokens)
    work = TraceWork(
        num_requests=requests,
        num_prompt_tokens=prompt_tokens,
        mean_new_tokens=mean_new_tokens,
        max_new_tokens=min(int(6 * mean_new_tokens), longest),
        vocab_size=contract.prompt_vocab_size,
        seed=0,
    )
    found = asyncio.run(measure(loaded, streams, work, turns))
    over = ratios(found)
    write_result(
        "loadtest.studies.joining",
        {
            "model": loaded.manifest.name,
            "one_chunk_over_all": over,
            "turns": {name: [turn._asdict() for turn in each] for name, each in found.items()},
        },
        out,
    )
    for name, ratio in over.items():
        click.echo(f"{name}: one chunk a step takes {ratio:.3f} times what all at once take")


if __name__ == "__main__":
    main()
