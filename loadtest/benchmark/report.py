"""The outcome of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.generation.core import StepTimes
from engine.package.manifest import GenerationContract
from loadtest.benchmark.memory import Memory, read_memory
from loadtest.benchmark.work import BenchmarkWork, cache_bytes


@dataclass(frozen=True)
class Round:
    """One measurement of one concurrency: the whole work, and prompts with one new token each."""

    seconds: float
    times: StepTimes
    prompt_seconds: float
    prompt_times: StepTimes


@dataclass(frozen=True)
class DecodeStep:
    """The parts of a step that takes in no prompt, in seconds."""

    total: float
    model: float
    sampling: float
    scheduling: float
    rest: float  # handing over, the event loop, detokenizing


@dataclass(frozen=True)
class ConcurrencyResult:
    """All rounds with the same number of requests at once; rates are medians over them."""

    concurrency: int
    tokens_per_second: float  # new ones, over the time of the whole work
    prefill_tokens_per_second: float  # prompts, over their time alone
    decode_step: DecodeStep | None  # None: the work has one new token only
    cache_bytes: int  # at the full length of the sequences
    memory: Memory  # after the last round
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark with all that was measured."""

    package: str
    manifest_sha256: str
    weights: str
    work: BenchmarkWork
    package_defaults: dict[str, Any]  # for options that a request leaves out; the work sets all
    num_threads: int  # given; of an encoder's graph too
    num_decoder_threads: int  # used: no more than the decoder has heads
    load_seconds: float  # checking the package, reading the graphs, starting
    weight_bytes: int  # the package's files
    memory_before: Memory
    memory_loaded: Memory
    results: tuple[ConcurrencyResult, ...]
    versions: dict[str, str]


def summarize(
    work: BenchmarkWork, concurrency: int, rounds: tuple[Round, ...], contract: GenerationContract
) -> ConcurrencyResult:
    """Return the medians over all rounds with the same number of requests at once."""
    seconds = statistics.median(r.seconds for r in rounds)
    prompt_seconds = statistics.median(r.prompt_seconds for r in rounds)
    return ConcurrencyResult(
        concurrency=concurrency,
        tokens_per_second=concurrency * work.num_new_tokens / seconds,
        prefill_tokens_per_second=concurrency * work.num_prompt_tokens / prompt_seconds,
        decode_step=decode_step(rounds) if work.num_new_tokens > 1 else None,
        cache_bytes=concurrency * cache_bytes(work, contract),
        memory=read_memory(),
        rounds=rounds,
    )


def decode_step(rounds: Sequence[Round]) -> DecodeStep | None:
    """Return the median step of what the whole work takes beyond its prompts."""
    parts = []
    for r in rounds:
        decoding = r.times.since(r.prompt_times)
        if decoding.steps <= 0:
            return None
        seconds = r.seconds - r.prompt_seconds
        values = (seconds, decoding.model, decoding.sampling, decoding.scheduling)
        parts.append([value / decoding.steps for value in values])
    total, model, sampling, scheduling = (
        statistics.median(column) for column in zip(*parts, strict=True)
    )
    rest = total - model - sampling - scheduling
    return DecodeStep(total, model, sampling, scheduling, rest)
