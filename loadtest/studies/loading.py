"""The study of loading: seconds and memory until an engine is ready, and under its first load.

`python -m loadtest.studies.loading packages/gpt2 --out loadtest/results/loading-gpt2`

Every load of a package is in a fresh process. With a generating model there is work then: a burst
of prompts with one new token each, a second such burst, and the whole work; and, in a process of
its own, the same with all tokens of the prompts scored. Cache in use are the positions of rows that
run, or are kept for prompts that begin alike (here none is), as far as their length: when all
requests have ended, none.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from engine.errors import ConfigError
from engine.generation.engine_loop import KEEP_MEMORY
from engine.package.manifest import GenerationContract
from engine.package.package import Package, load_package
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.memory import read_memory
from loadtest.benchmark.work import (
    BenchmarkWork,
    cache_bytes,
    check_fits,
    generation_contract,
    random_prompts,
)
from loadtest.studies.heading import write_result

# Everything that a worker does before it serves: imports, hashes, sessions.
_PROGRAM = """
import json, sys, time
started = time.perf_counter()
from loadtest.benchmark.memory import read_memory
from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
engine = load_engine(load_package(sys.argv[1]), EngineConfig())
seconds, memory = time.perf_counter() - started, read_memory()
print(json.dumps({"seconds": seconds, "peak": memory.peak, "steady": memory.resident,
                  "mapped": memory.mapped}))
"""
_LOAD_PROGRAM = """
import json, sys
from loadtest.studies.loading import run_load
print(json.dumps(run_load(*json.loads(sys.argv[1]))))
"""
_SLACK_WEIGHTS = 1.2  # an engine should hold at most so much for its weights,
_SLACK_BYTES = 150e6  # the cache in use, and this for everything else
_NUM_ALTERNATIVES = 5  # for every token of prompts that are scored
_LOOK_SECONDS = 0.02  # between two looks at the memory


@dataclass(frozen=True)
class Loading:
    """One load of a package."""

    seconds: float  # from the start of the program, its imports included
    peak: int  # bytes of resident memory; pages of mapped files count too
    steady: int
    mapped: int  # the steady pages of files


@dataclass(frozen=True)
class UnderLoad:
    """The first work of an engine; no prompt comes twice."""

    first_burst: float  # seconds until all prompts have their first token
    second_burst: float
    resident: int  # most bytes during the whole work; pages of mapped files count too
    cache: int  # bytes in use at its end, the most there were
    rest: int  # bytes resident when it is over


def load_once(package: Path) -> Loading:
    """Load a package in a process of its own."""
    return Loading(**_in_a_process(_PROGRAM, str(package)))


def load_and_work_once(package: Path, work: BenchmarkWork, num_requests: int) -> UnderLoad:
    """Load a package in a process of its own, and work there; so many requests at a time."""
    arguments = [str(package), asdict(work), num_requests]
    return UnderLoad(**_in_a_process(_LOAD_PROGRAM, json.dumps(arguments)))


def run_load(path: str, work: dict[str, Any], num_requests: int) -> dict[str, float]:
    """Load a package here and work; return the fields of UnderLoad."""
    return asdict(asyncio.run(_run_load(load_package(path), BenchmarkWork(**work), num_requests)))


async def _run_load(package: Package, work: BenchmarkWork, num_requests: int) -> UnderLoad:
    contract = generation_contract(package)
    check_fits(work, contract)
    bench = EngineBench.load(package, max_num_seqs=num_requests)
    await bench.start()
    try:
        return await measure_load(bench, contract, work, num_requests)
    finally:
        await bench.stop()


async def measure_load(
    bench: EngineBench, contract: GenerationContract, work: BenchmarkWork, num_requests: int
) -> UnderLoad:
    """Give a started engine its first work."""

    async def burst(number: int, num_new: int) -> float:
        prompts = random_prompts(work, num_requests, contract.vocab_size, number)
        params = [work.params(index, num_new) for index in range(num_requests)]
        return (await bench.measure(prompts, params.__getitem__)).seconds

    first, second = await burst(0, 1), await burst(1, 1)
    resident = await _most_resident(burst(2, work.num_new_tokens))
    await asyncio.sleep(KEEP_MEMORY + 0.5)  # until then freed pages are kept
    cache = num_requests * cache_bytes(work, contract)
    return UnderLoad(first, second, resident, cache, rest=_resident())


async def _most_resident(work: Awaitable[object]) -> int:
    """Do some work; return the most bytes that were resident meanwhile."""
    doing, most = asyncio.ensure_future(work), _resident()
    while not doing.done():
        await asyncio.wait([doing], timeout=_LOOK_SECONDS)
        most = max(most, _resident())
    await doing
    return most


def _resident() -> int:
    resident = read_memory().resident
    if resident is None:
        raise ConfigError("this system does not tell the memory of a process; measure on Linux")
    return resident


def weight_bytes(package: Package) -> int:
    """Return the size of the files of weights."""
    files = package.manifest.files
    return sum(entry.size for name, entry in files.items() if name.endswith(".data"))


def allowed_bytes(weights: int, cache: int) -> float:
    """Return how much an engine should hold at most for so many weights and so much cache."""
    return _SLACK_WEIGHTS * weights + cache + _SLACK_BYTES


def summary_of_loads(weights: int, loads: Sequence[Loading]) -> dict[str, Any]:
    """Return what is written of loading alone."""
    return {
        "weight_bytes": weights,
        "peak_to_weights": max(load.peak for load in loads) / weights,
        "steady_to_weights": max(load.steady for load in loads) / weights,
        "steady_without_mapped_to_weights": max(load.steady - load.mapped for load in loads)
        / weights,
        "median_seconds": statistics.median(load.seconds for load in loads),
        "loads": [asdict(load) for load in loads],
    }


def summary_under_load(weights: int, rounds: Sequence[UnderLoad]) -> dict[str, Any]:
    """Return what is written of the first work."""
    cache = rounds[0].cache
    return {
        "cache_bytes": cache,
        "resident_bytes": max(one.resident for one in rounds),
        "allowed_bytes": allowed_bytes(weights, cache),
        "rest_bytes": max(one.rest for one in rounds),
        "allowed_rest_bytes": allowed_bytes(weights, 0),
        "first_to_second_burst": statistics.median(
            one.first_burst / one.second_burst for one in rounds
        ),
        "rounds": [asdict(one) for one in rounds],
    }


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=1), default=62, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path, rounds: int, requests: int, prompt_tokens: int, new_tokens: int, out: Path
) -> None:
    """Load PACKAGE again and again, alone and with work to do, and write OUT.json."""
    loaded = load_package(package)
    weights = weight_bytes(loaded)
    content = summary_of_loads(weights, [load_once(package) for _ in range(rounds)])
    _tell_loading(content)
    if loaded.manifest.generation is not None:
        work = BenchmarkWork(num_prompt_tokens=prompt_tokens, num_new_tokens=new_tokens)
        scoring = replace(work, prompt_logprobs=_NUM_ALTERNATIVES)
        for name, one in (("under_load", work), ("under_load_scored", scoring)):
            worked = [load_and_work_once(package, one, requests) for _ in range(rounds)]
            content[name] = summary_under_load(weights, worked)
            _tell_load(name.replace("_", " "), content[name])
    write_result("loadtest.studies.loading", content, out)


def _in_a_process(program: str, argument: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, argument], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _tell_loading(found: Mapping[str, Any]) -> None:
    click.echo(
        f"ready in {found['median_seconds']:.2f} s; weights {found['weight_bytes'] / 1e6:.0f} MB, "
        f"peak {found['peak_to_weights']:.2f} times them, "
        f"steady {found['steady_to_weights']:.2f} times, "
        f"{found['steady_without_mapped_to_weights']:.2f} without pages of files"
    )


def _tell_load(name: str, found: Mapping[str, Any]) -> None:
    click.echo(
        f"{name} {found['resident_bytes'] / 1e6:.0f} MB with "
        f"{found['cache_bytes'] / 1e6:.0f} MB of cache in use, "
        f"at most {found['allowed_bytes'] / 1e6:.0f} MB wanted; "
        f"{found['rest_bytes'] / 1e6:.0f} MB afterwards, "
        f"at most {found['allowed_rest_bytes'] / 1e6:.0f} MB wanted; "
        f"the first burst of prompts takes {found['first_to_second_burst']:.2f} times "
        "the second"
    )


if __name__ == "__main__":
    main()
