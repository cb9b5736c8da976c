"""Requests that arrive at random and have lengths at random, run under one of three policies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from engine.generation.async_engine import AsyncEngine
from engine.requests.request import GenerationRequest, SamplingParams
from loadtest.arrival.arrival import OpenLoop
from loadtest.arrival.rates import Rates

Policy = Literal["continuous", "static", "early exit"]


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at: float  # seconds from the start
    prompt: tuple[int, ...]
    num_new_tokens: int


class Served(NamedTuple):
    """The times of a request, in seconds from the start."""

    arrived: float
    ended: float
    num_new_tokens: int


@dataclass(frozen=True)
class TraceWork:
    """The shape of a trace's requests."""

    num_requests: int
    num_prompt_tokens: int
    mean_new_tokens: float  # 1 or more
    max_new_tokens: int
    vocab_size: int
    seed: int


def draw_trace(rate: float, work: TraceWork) -> list[Arrival]:
    """Return arrivals of a Poisson process, with output lengths of a geometric distribution.

    Lengths and prompts depend on the seed only, so that every rate has the same work.
    """
    draw, count = np.random.default_rng(work.seed), work.num_requests
    lengths = draw.geometric(1 / work.mean_new_tokens, count).clip(max=work.max_new_tokens)
    prompts = draw.integers(work.vocab_size, size=(count, work.num_prompt_tokens))
    times = OpenLoop(Rates((rate,))).times(count, None, work.seed)
    return [
        Arrival(at, tuple(prompt), length)
        for at, prompt, length in zip(
            times.tolist(), prompts.tolist(), lengths.tolist(), strict=True
        )
    ]


async def serve_trace(
    engine: AsyncEngine, trace: Sequence[Arrival], policy: Policy, *, max_batch: int
) -> list[Served]:
    """Submit every request when it arrives, or in batches.

    A batch is all that waits, at most `max_batch` requests, and starts only when the last one has
    ended. Static is what a server around `generate` does: the batch keeps its size until its
    longest output is done, and all answers are given then. With early exit a request leaves the
    batch, and is answered, with its own last token: kinder than most servers that batch so.
    """
    started = time.perf_counter()
    if policy == "continuous":
        return list(await asyncio.gather(*(_arrive(engine, a, started) for a in trace)))
    waiting: list[Arrival] = list(trace)
    served: list[Served] = []
    while waiting:
        await _until(started + waiting[0].at)
        now = time.perf_counter() - started
        batch = [arrival for arrival in waiting[:max_batch] if arrival.at <= now]
        del waiting[: len(batch)]
        if policy == "static":
            served += await _generate_together(engine, batch, started)
        else:
            served += await asyncio.gather(*(_generate(engine, a, started) for a in batch))
    return served


async def _generate_together(
    engine: AsyncEngine, batch: Sequence[Arrival], started: float
) -> list[Served]:
    longest = max(arrival.num_new_tokens for arrival in batch)
    padded = [replace(arrival, num_new_tokens=longest) for arrival in batch]
    await asyncio.gather(*(_generate(engine, arrival, started) for arrival in padded))
    ended = time.perf_counter() - started
    return [Served(arrival.at, ended, arrival.num_new_tokens) for arrival in batch]


_IDS = count()


async def _arrive(engine: AsyncEngine, arrival: Arrival, started: float) -> Served:
    await _until(started + arrival.at)
    return await _generate(engine, arrival, started)


async def _generate(engine: AsyncEngine, arrival: Arrival, started: float) -> Served:
    params = SamplingParams(max_new_tokens=arrival.num_new_tokens, ignore_eos=True)
    request = GenerationRequest(f"study-{next(_IDS)}", arrival.prompt, params)
    async for _ in engine.generate(request):
        pass
    return Served(arrival.at, time.perf_counter() - started, arrival.num_new_tokens)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))
