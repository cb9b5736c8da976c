"""Measures an engine at every concurrency, and says where the time goes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.machine import num_cores
from engine.package.manifest import GenerationContract
from engine.package.package import load_package
from engine.slots.generation_sessions import decoder_threads
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.memory import read_memory
from loadtest.benchmark.report import BenchmarkReport, ConcurrencyResult, Round, summarize
from loadtest.benchmark.work import BenchmarkWork, check_fits, generation_contract, random_prompts
from loadtest.origin import versions_of

_DISTRIBUTIONS = ("tokenweir", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")
Progress = Callable[[int, int], None]  # rounds done, rounds in all


def run_benchmark(
    path: str | os.PathLike[str],
    work: BenchmarkWork,
    concurrencies: Sequence[int],
    *,
    num_rounds: int,
    settings: EngineConfig,
    progress: Progress,
    tell: Callable[[str], None],
) -> BenchmarkReport:
    """Load a package and run the work at every concurrency; a round before the first warms up.

    `tell` is given what happens while the engine starts, a line at a time; see `load_engine`.

    `settings` say where the engine runs; what it takes at once follows from the concurrencies.
    Raises PackageError if the package does not generate, and ConfigError for work that does not
    fit into the model.
    """
    memory_before, started = read_memory(), time.perf_counter()
    package = load_package(path)
    contract, manifest = generation_contract(package), package.manifest
    check_fits(work, contract)
    work = replace(work, top_k=min(work.top_k, contract.vocab_size))
    max_num_seqs = max(max(concurrencies) * work.beam_width, *settings.decode_buckets, 1)
    bench = EngineBench.load(package, max_num_seqs=max_num_seqs, settings=settings, tell=tell)
    results: list[ConcurrencyResult] = []
    with asyncio.Runner() as runner:
        runner.run(bench.start())
        try:
            load_seconds, memory_loaded = time.perf_counter() - started, read_memory()
            for concurrency in concurrencies:
                done = len(results) * num_rounds

                def moved(rounds: int, done: int = done) -> None:
                    progress(done + rounds, len(concurrencies) * num_rounds)

                measuring = _measure(bench, work, concurrency, contract, num_rounds, moved)
                results.append(summarize(work, concurrency, runner.run(measuring), contract))
        finally:  # a thread that still computes while the interpreter ends aborts the process
            runner.run(bench.stop())
    return BenchmarkReport(
        package=manifest.name,
        manifest_sha256=package.manifest_sha256.hex(),
        weights=manifest.weights,
        work=work,
        package_defaults=dict(manifest.defaults.given),
        num_threads=settings.num_threads or num_cores(),
        num_decoder_threads=decoder_threads(contract, settings.num_threads),
        load_seconds=load_seconds,
        weight_bytes=sum(file.size for file in manifest.files.values()),
        memory_before=memory_before,
        memory_loaded=memory_loaded,
        results=tuple(results),
        versions={"python": sys.version.partition(" ")[0], **versions_of(*_DISTRIBUTIONS)},
    )


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
