"""The study of trees: an engine of this checkout and those of older ones, in turns.

`python -m loadtest.lab regression packages/dates --against ../old packages/dates --new-tokens 15
--out loadtest/results/trees-dates`

Every tree has a process of its own with its own code and a package that this code can read. They
get the same work one after the other, each of them first as often as the others, so that what slows
the machine for a while slows all of them. Neighbours are compared: the figure is the median of
the ratios of a turn, below 1 if this checkout is faster. The processor time counts; the time of
the clock stands beside it, and holds what else the machine had to do.

The place of a process in memory makes it slower or faster by some hundredths as long as it runs:
`--starts` divides the time among so many processes of each tree, of which this checkout's is the
first to start and the last one in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import click

from loadtest.benchmark.work import BenchmarkWork
from loadtest.errors import LoadTestError
from loadtest.lab.result import write_result
from loadtest.origin import code_commit

_ROOT = Path(__file__).parents[2]
_ASKED = ("num_prompt_tokens", "num_new_tokens")  # fields of the work; all else is as in every tree
# By the names that modules had in older trees, too. One thread: others wait busily for their work.
_PROGRAM = """
import asyncio, importlib, inspect, json, sys, time
def module(*names):
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise SystemExit(f"none of {names} is here: this study does not know so old a tree")
load = module("engine.package.package", "engine.package").load_package
work = module("loadtest.benchmark.work", "engine.benchmark")
EngineBench = module("loadtest.benchmark.engine_bench", "engine.benchmark").EngineBench
from engine.config import EngineConfig
has_settings = "settings" in inspect.signature(EngineBench.load).parameters
threads = {"settings": EngineConfig(num_threads=1)} if has_settings else {"num_threads": 1}
async def main(package, max_num_seqs):
    package = load(package)
    bench = EngineBench.load(package, max_num_seqs=max_num_seqs, **threads)
    await bench.start()
    print("ready", flush=True)
    for line in sys.stdin:
        count, number, asked = json.loads(line)
        one = work.BenchmarkWork(**asked)
        vocab_size = package.manifest.generation.vocab_size
        prompts = work.random_prompts(one, count, vocab_size, number)
        wall, processor = time.perf_counter(), time.process_time()
        await bench.measure(prompts, lambda index: one.params(index, one.num_new_tokens))
        print(json.dumps([time.process_time() - processor, time.perf_counter() - wall]), flush=True)
    await bench.stop()
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Turn(NamedTuple):
    """Times of some work in one tree, in seconds."""

    processor: float
    wall: float


Turns = list[list[Turn]]  # by tree


class Tree(NamedTuple):
    """A checkout of this code, and a package that it can read."""

    path: Path
    package: Path

    @property
    def commit(self) -> str:
        """The commit that is checked out; of no repository, the folder."""
        if self.path == _ROOT:
            return code_commit()
        asked = ["git", "-C", str(self.path), "rev-parse", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True)
        return done.stdout.strip() or str(self.path)


class Worker:
    """The process of a tree."""

    def __init__(self, process: subprocess.Popen[str], tree: Tree) -> None:
        self._process = process
        self._tree = tree
        self._read()  # that it is ready

    def do(self, num_streams: int, number: int, work: BenchmarkWork) -> Turn:
        """Let it do some work, whose prompts are those of this number."""
        assert self._process.stdin is not None
        asked = {name: getattr(work, name) for name in _ASKED}
        self._process.stdin.write(json.dumps([num_streams, number, asked]) + "\n")
        self._process.stdin.flush()
        return Turn(*json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadTestError(
                f"the process of {self._tree.path} has ended; what it wrote says why: "
                f"give a package that this tree can read instead of {self._tree.package}"
            )
        return line


@contextmanager
def started(tree: Tree, max_num_seqs: int) -> Iterator[Worker]:
    """Run a tree's engine in a process, until the end of the block."""
    path = tree.path.resolve()
    places = (path, path / "proto" / "python", path / "proto" / "gen")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, str(tree.package.resolve()), str(max_num_seqs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        cwd=path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Worker(process, tree)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends by itself then
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def take_turns(
    workers: Sequence[Worker], num_streams: int, work: BenchmarkWork, seconds: float
) -> Turns:
    """Let all do the same work again and again; return the turns of each, behind the first."""
    found: Turns = [[] for _ in workers]
    number, end = 0, time.monotonic() + seconds
    while number < 2 or time.monotonic() < end:
        for place in range(len(workers)):
            one = (place + number) % len(workers)
            turn = workers[one].do(num_streams, number, work)
            if number > 0:  # the first one warms up
                found[one].append(turn)
        number += 1
    return found


def ratios_of(own: Sequence[Turn], other: Sequence[Turn]) -> dict[str, float]:
    """Return how long this checkout takes, as a part of what the other does in the same turn."""
    processor = [a.processor / b.processor for a, b in zip(own, other, strict=True)]
    wall = [a.wall / b.wall for a, b in zip(own, other, strict=True)]
    return {
        "processor": statistics.median(processor),
        "processor_least": min(t.processor for t in own) / min(t.processor for t in other),
        "wall": statistics.median(wall),
    }


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--against",
    nargs=2,
    multiple=True,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="TREE PACKAGE",
    help="An older checkout, and the same model as it exports it; may be given several times.",
)
@click.option("--streams", default="1,8,32", show_default=True, metavar="COUNT,...")
@click.option("--prompt-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seconds", type=float, default=30.0, show_default=True, help="A count of streams.")
@click.option("--starts", type=click.IntRange(1), default=1, show_default=True, help="Of a tree.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    against: Sequence[tuple[Path, Path]],
    streams: str,
    prompt_tokens: int,
    new_tokens: int,
    seconds: float,
    starts: int,
    out: Path,
) -> None:
    """Hold the engine of this checkout on PACKAGE against those of others; write OUT.json."""
    trees = [Tree(_ROOT, package), *(Tree(*other) for other in against)]
    work = BenchmarkWork(num_prompt_tokens=prompt_tokens, num_new_tokens=new_tokens)
    counts = [int(count) for count in streams.split(",")]
    of_starts: dict[int, list[Turns]] = {count: [] for count in counts}
    for number in range(starts):
        with ExitStack() as stack:
            turned = -1 if number % 2 else 1  # which of them starts first makes a difference, too
            workers = [stack.enter_context(started(tree, max(counts))) for tree in trees[::turned]][
                ::turned
            ]
            for count in counts:
                of_starts[count].append(take_turns(workers, count, work, seconds / starts))
    results = [result_of(count, trees, found) for count, found in of_starts.items()]
    for result in results:
        _tell(result)
    content = {"work": asdict(work), "results": results}
    write_result(content, out)


def result_of(count: int, trees: Sequence[Tree], of_starts: Sequence[Turns]) -> dict[str, object]:
    """Return what the turns of all starts tell, and what each of the starts does."""
    own = list(chain.from_iterable(turns[0] for turns in of_starts))
    return {
        "streams": count,
        "turns": len(own),
        "processor_seconds": statistics.median(turn.processor for turn in own),
        "wall_seconds": statistics.median(turn.wall for turn in own),
        "ratios": {
            tree.commit: _of_all([ratios_of(turns[0], turns[place]) for turns in of_starts])
            for place, tree in enumerate(trees[1:], start=1)
        },
    }


def _of_all(of_starts: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return the geometric means of the ratios of all starts, and those of each start."""
    found: dict[str, object] = {
        name: statistics.geometric_mean(one[name] for one in of_starts) for name in of_starts[0]
    }
    return {**found, "processor_by_start": [one["processor"] for one in of_starts]}


def _tell(result: Mapping[str, object]) -> None:
    ratios = result["ratios"]
    assert isinstance(ratios, dict)
    for commit, ratio in ratios.items():
        click.echo(
            f"{result['streams']} streams, {result['turns']} turns: {ratio['processor']:.3f} of "
            f"the processor time of {commit[:7]}, {ratio['wall']:.3f} of the clock's"
        )
