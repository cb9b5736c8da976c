"""Measures an engine on work of fixed shape: tokens per second, parts of a step, memory."""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.errors import ConfigError, PackageError
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import StepTimes
from engine.machine import num_cores
from engine.package.device_certificate import with_buckets
from engine.package.manifest import CacheShape, GenerationContract
from engine.package.package import Package, load_package
from engine.requests.events import RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from engine.threads import decoder_threads

Choice = Literal["greedy", "topk", "beam"]
Progress = Callable[[int, int], None]  # rounds done, rounds in all
Prompt = tuple[int, ...]

_BYTES_PER_NUMBER = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # of the cache


@dataclass(frozen=True)
class BenchmarkWork:
    """What every request of a benchmark asks for."""

    num_prompt_tokens: int = 128
    num_new_tokens: int = 64  # exactly: the end of a sequence is ignored
    strategy: Choice = "greedy"
    top_k: int = 50  # with "topk" only; a smaller vocabulary is drawn from whole
    beam_width: int = 1  # above 1 with "beam" only
    seed: int = 0  # of prompts and draws

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "num_new_tokens", "beam_width"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1")
        if (self.strategy == "beam") != (self.beam_width > 1):
            raise ConfigError(
                f"beam_width is {self.beam_width} and strategy {self.strategy}; "
                "beam search has a width of 2 or more, everything else of 1"
            )

    def params(self, index: int, num_new_tokens: int) -> SamplingParams:
        """Return how the tokens of request `index` are chosen."""
        common = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        if self.strategy == "topk":
            return replace(common, strategy="sampling", top_k=self.top_k, seed=self.seed + index)
        if self.strategy == "beam":
            return replace(common, strategy="beam", beam_width=self.beam_width)
        return common


@dataclass(frozen=True)
class Answer:
    """What one request brought."""

    token_ids: tuple[int, ...]
    time_to_first_token: float  # seconds from its arrival
    end_to_end: float


@dataclass(frozen=True)
class Measured:
    """Requests that were submitted at once, from then until the last has ended."""

    seconds: float
    answers: tuple[Answer, ...]  # in the order of the requests
    times: StepTimes


@dataclass(frozen=True)
class Memory:
    """Memory of the process in bytes; None where the system does not tell."""

    resident: int | None
    peak: int | None  # of the resident
    mapped: int | None  # of the resident now, pages of files: the system takes them back at need


@dataclass(frozen=True)
class Round:
    """One measurement of one concurrency: the whole work, and prompts with one new token each."""

    seconds: float
    times: StepTimes
    prompt_seconds: float
    prompt_times: StepTimes


@dataclass(frozen=True)
class DecodeStep:
    """Where the time of a step that takes in no prompt goes, in seconds."""

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
    prefill_tokens_per_second: float  # of prompts, over their time alone
    decode_step: DecodeStep | None  # None: the work has one new token only
    cache_bytes: int  # that the sequences reach at their full length
    memory: Memory  # after the last round
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark with all that was measured."""

    package: str
    manifest_sha256: str
    weights: str
    work: BenchmarkWork
    num_threads: int  # given; of an encoder's graph too
    num_decoder_threads: int  # used: no more than the decoder has heads
    load_seconds: float  # checking the package, reading the graphs, starting
    weight_bytes: int  # of the package's files
    memory_before: Memory
    memory_loaded: Memory
    results: tuple[ConcurrencyResult, ...]
    versions: dict[str, str]


def run_benchmark(
    path: str | os.PathLike[str],
    work: BenchmarkWork,
    concurrencies: Sequence[int],
    *,
    num_rounds: int = 3,
    settings: EngineConfig | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> BenchmarkReport:
    """Load a package and run the work at every concurrency; a round before the first warms up.

    `tell` is given what happens while the engine starts, a line at a time; see `load_engine`.

    `settings` say where the engine runs; what it takes at once follows from the concurrencies.
    Raises PackageError if the package does not generate, and ConfigError for work that does not
    fit into the model.
    """
    return asyncio.run(
        _run(
            path,
            work,
            concurrencies,
            num_rounds,
            settings or EngineConfig(),
            progress or _no_progress,
            tell,
        )
    )


class EngineBench:
    """An engine, and how long it takes for work that it is given."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._ids = count()

    @classmethod
    def load(
        cls,
        package: Package,
        *,
        max_num_seqs: int,
        settings: EngineConfig | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> EngineBench:
        """Load the engine of a package that generates; else raise PackageError."""
        generation_contract(package)
        config = settings_for(package, max_num_seqs, settings or EngineConfig())
        engine = load_engine(package, config, tell=tell)
        assert isinstance(engine, AsyncEngine), "it has a generation contract"
        return cls(engine)

    async def start(self) -> None:
        """Begin to take work."""
        await self._engine.start()

    async def stop(self) -> None:
        """End the engine's thread."""
        await self._engine.stop()

    async def measure(
        self, prompts: Sequence[Prompt], params: Callable[[int], SamplingParams]
    ) -> Measured:
        """Submit all prompts at once; `params` gives those of a prompt by its index."""
        before = self._engine.step_times
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(self._answer(prompt, params(index)) for index, prompt in enumerate(prompts))
        )
        seconds = time.perf_counter() - started
        return Measured(seconds, tuple(answers), self._engine.step_times.since(before))

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        started = time.perf_counter()
        token_ids: tuple[int, ...] = ()
        first = 0.0
        request = GenerationRequest(f"bench-{next(self._ids)}", prompt, params)
        async for event in self._engine.generate(request):
            if isinstance(event, SequenceFinished) and event.index == 0:
                token_ids = event.token_ids
            elif isinstance(event, RequestFinished):
                first = event.timing.time_to_first_token
        return Answer(token_ids, first, time.perf_counter() - started)


async def _run(
    path: str | os.PathLike[str],
    work: BenchmarkWork,
    concurrencies: Sequence[int],
    num_rounds: int,
    settings: EngineConfig,
    progress: Progress,
    tell: Callable[[str], None] | None,
) -> BenchmarkReport:
    memory_before = read_memory()
    started = time.perf_counter()
    package = load_package(path)
    contract = generation_contract(package)
    check_fits(work, contract)
    work = replace(work, top_k=min(work.top_k, contract.vocab_size))
    slots = max(max(concurrencies) * work.beam_width, *settings.decode_buckets, 1)
    bench = EngineBench.load(package, max_num_seqs=slots, settings=settings, tell=tell)
    await bench.start()
    try:
        load_seconds, memory_loaded = time.perf_counter() - started, read_memory()
        results = await _measure_all(bench, work, concurrencies, contract, num_rounds, progress)
    finally:  # a thread that still computes while the interpreter ends aborts the process
        await bench.stop()
    return BenchmarkReport(
        package=package.manifest.name,
        manifest_sha256=package.manifest_sha256.hex(),
        weights=package.manifest.weights,
        work=work,
        num_threads=settings.num_threads or num_cores(),
        num_decoder_threads=decoder_threads(contract, settings.num_threads),
        load_seconds=load_seconds,
        weight_bytes=sum(file.size for file in package.manifest.files.values()),
        memory_before=memory_before,
        memory_loaded=memory_loaded,
        results=results,
        versions=_versions(),
    )


async def _measure_all(
    bench: EngineBench,
    work: BenchmarkWork,
    concurrencies: Sequence[int],
    contract: GenerationContract,
    num_rounds: int,
    progress: Progress,
) -> tuple[ConcurrencyResult, ...]:
    results: list[ConcurrencyResult] = []
    for concurrency in concurrencies:
        done = len(results) * num_rounds

        def moved(rounds: int, done: int = done) -> None:
            progress(done + rounds, len(concurrencies) * num_rounds)

        rounds = await _measure(bench, work, concurrency, contract, num_rounds, moved)
        results.append(_summarize(work, concurrency, rounds, contract))
    return tuple(results)


async def _measure(
    bench: EngineBench,
    work: BenchmarkWork,
    concurrency: int,
    contract: GenerationContract,
    num_rounds: int,
    moved: Callable[[int], None],
) -> tuple[Round, ...]:
    rounds = []
    for number in range(num_rounds + 1):
        # Never the same prompt twice: what is kept of one must not help another.
        prompts, others = (
            random_prompts(work, concurrency, contract.vocab_size, 2 * number + part)
            for part in (0, 1)
        )
        alone = await bench.measure(prompts, lambda index: work.params(index, 1))
        whole = await bench.measure(others, lambda index: work.params(index, work.num_new_tokens))
        if number > 0:  # the first one warms up
            rounds.append(Round(whole.seconds, whole.times, alone.seconds, alone.times))
        moved(number)
    return tuple(rounds)


def _summarize(
    work: BenchmarkWork, concurrency: int, rounds: tuple[Round, ...], contract: GenerationContract
) -> ConcurrencyResult:
    seconds = statistics.median(r.seconds for r in rounds)
    prompt_seconds = statistics.median(r.prompt_seconds for r in rounds)
    return ConcurrencyResult(
        concurrency=concurrency,
        tokens_per_second=concurrency * work.num_new_tokens / seconds,
        prefill_tokens_per_second=concurrency * work.num_prompt_tokens / prompt_seconds,
        decode_step=_decode_step(rounds) if work.num_new_tokens > 1 else None,
        cache_bytes=concurrency * cache_bytes(work, contract),
        memory=read_memory(),
        rounds=rounds,
    )


def _decode_step(rounds: Sequence[Round]) -> DecodeStep | None:
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


def generation_contract(package: Package) -> GenerationContract:
    """Return what is known of a generating model; PackageError for any other."""
    contract = package.manifest.generation
    if contract is None:
        raise PackageError(
            f"{package.path}: {package.manifest.name} does not generate, and only generating "
            "models are measured here; give one that does"
        )
    return contract


def random_prompts(
    work: BenchmarkWork, num_prompts: int, vocab_size: int, number: int = 0
) -> list[Prompt]:
    """Return prompts of exactly the asked length, other ones for every `number`."""
    draw = random.Random(f"{work.seed} {number}")
    return [
        tuple(draw.randrange(vocab_size) for _ in range(work.num_prompt_tokens))
        for _ in range(num_prompts)
    ]


def check_fits(work: BenchmarkWork, contract: GenerationContract) -> None:
    """Raise ConfigError, naming the limit, if a request of the work is too long for the model."""
    prompt, new, limit = work.num_prompt_tokens, work.num_new_tokens, contract.cache.max_len
    if contract.cross_cache is None:
        if prompt + new > limit:
            raise ConfigError(
                f"{prompt} prompt tokens and {new} new ones are {prompt + new}, more than the "
                f"{limit} that this model's context holds; ask for fewer"
            )
        return
    if prompt > contract.cross_cache.max_len:
        raise ConfigError(
            f"{prompt} prompt tokens are more than {contract.cross_cache.max_len}, the longest "
            "source of this model; ask for fewer"
        )
    if new > limit - 1:
        raise ConfigError(
            f"{new} new tokens are more than {limit - 1}, the longest output of this model; "
            "ask for fewer"
        )


def read_memory() -> Memory:
    """Return what this process uses now and has used at most."""
    status = Path("/proc/self/status")
    if not status.exists():
        return Memory(None, None, None)
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status.read_text(), re.MULTILINE))
    return Memory(*(int(kilobytes[name]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile")))


def settings_for(package: Package, num_seqs: int, settings: EngineConfig) -> EngineConfig:
    """Return settings that take in so many requests at once; a package on a GPU as it was shown."""
    shown = package.manifest.certificate.device
    on_gpu = settings.device_for(package.manifest.target) == "cuda"
    if on_gpu and shown and not settings.decode_buckets:
        if num_seqs <= max(shown.buckets, default=0):
            settings = with_buckets(settings, shown.buckets)
            num_seqs = settings.max_num_seqs
    return _for_so_many(num_seqs, settings)


def _for_so_many(max_num_seqs: int, settings: EngineConfig) -> EngineConfig:
    return replace(
        settings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(
            settings.max_num_batched_tokens, max_num_seqs + settings.prefill_chunk_size
        ),
        max_queue_size=max(settings.max_queue_size, max_num_seqs),
        reuse_prefixes=False,  # the same prompts come round after round
    )


def cache_bytes(work: BenchmarkWork, contract: GenerationContract) -> int:
    """Return the cache that one request reaches; the last token's keys are never needed."""
    cache, cross = contract.cache, contract.cross_cache
    position = _position_bytes(cache)
    if cross is None:
        return position * work.beam_width * (work.num_prompt_tokens + work.num_new_tokens - 1)
    source = _position_bytes(cross)
    return position * work.beam_width * work.num_new_tokens + source * work.num_prompt_tokens


def _position_bytes(shape: CacheShape) -> int:
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return numbers * _BYTES_PER_NUMBER[shape.dtype]


def _versions() -> dict[str, str]:
    found = {"python": sys.version.partition(" ")[0]}
    for name in ("tokenweir", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _no_progress(done: int, total: int) -> None:
    pass
