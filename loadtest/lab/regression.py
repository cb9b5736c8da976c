"""The study of regression: the engine of this checkout and those of older ones, in turns.

`python -m loadtest.lab regression packages/dates --against ../old ../old/packages/dates
--new-tokens 15 --out loadtest/results/trees-dates`

Every tree has a process of its own with its own code and a package that this code can read. They
get the same work one after the other: prompts of random tokens, other ones in every turn, and a
fixed number of greedy tokens behind each. Neighbours are compared: the figure is the median of the
ratios of a turn, below 1 if the first of two is faster. The processor time counts; the time of the
clock stands beside it, and holds what else the machine had to do.

With `--served` a server of every tree takes turns, too. It streams every answer by gRPC to a client
in this process, and is held against the engine of its tree: the ratio of the clock's time is what
the server leaves of the tokens a second that `tokenweir bench` counts.

The place of a process in memory makes it slower or faster by some hundredths as long as it runs:
`--starts` divides the time among so many processes of each, which start in turned order.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import click
import uvloop
from tokenweir import AsyncClient

from loadtest.benchmark.work import BenchmarkWork, Prompt, random_prompts
from loadtest.errors import LoadTestError
from loadtest.lab.line_process import LineProcess
from loadtest.lab.process_tree import read_tree
from loadtest.lab.result import write_result
from loadtest.lab.serve import ROOT, environment, served
from loadtest.lab.turns import in_turn, ratio_of
from loadtest.origin import code_commit
from server.cli.options import read_numbers

_ASKED = ("num_prompt_tokens", "num_new_tokens")  # fields of the work; all else is as in every tree
_PROGRAM = """
import asyncio, json, sys, time
from engine.config import EngineConfig
from engine.package.package import load_package
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.work import BenchmarkWork, random_prompts
async def main(package, max_num_seqs, num_threads):
    package, settings = load_package(package), EngineConfig(num_threads=num_threads)
    bench = EngineBench.load(package, max_num_seqs=max_num_seqs, settings=settings)
    await bench.start()
    vocab_size = package.manifest.generation.vocab_size
    print(json.dumps(vocab_size), flush=True)
    for line in sys.stdin:
        count, number, asked = json.loads(line)
        one = BenchmarkWork(**asked)
        prompts = random_prompts(one, count, vocab_size, number)
        wall, processor = time.perf_counter(), time.process_time()
        await bench.measure(prompts, lambda index: one.params(index, one.num_new_tokens))
        print(json.dumps([time.process_time() - processor, time.perf_counter() - wall]), flush=True)
    await bench.stop()
asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


class Turn(NamedTuple):
    """Times of some work in one side, in seconds."""

    processor: float
    wall: float


class Side(Protocol):
    """An engine or a server that takes turns with others."""

    def do(self, num_streams: int, number: int, work: BenchmarkWork) -> Turn:
        """Do some work, whose prompts are those of this number."""


Turns = list[list[Turn]]  # by side


class Tree(NamedTuple):
    """A checkout of this code, and a package that it can read."""

    path: Path
    package: Path

    @property
    def commit(self) -> str:
        """The commit that is checked out; of no repository, the folder."""
        if self.path == ROOT:
            return code_commit()
        asked = ["git", "-C", str(self.path), "rev-parse", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True)
        return done.stdout.strip() or str(self.path)


class Limits(NamedTuple):
    """The bounds of every side."""

    num_seqs: int
    num_threads: int  # others than the first wait busily for their work


class EngineSide:
    """The process of a tree's engine."""

    def __init__(self, process: LineProcess, tree: Tree) -> None:
        self._process = process
        try:
            self.vocab_size: int = process.read()
        except LoadTestError as error:
            raise LoadTestError(
                f"the engine of {tree.path} does not start; what it wrote says why: give a "
                f"package that this tree can read instead of {tree.package}"
            ) from error

    def do(self, num_streams: int, number: int, work: BenchmarkWork) -> Turn:
        """Do some work, see Side."""
        asked = {name: getattr(work, name) for name in _ASKED}
        return Turn(*self._process.ask([num_streams, number, asked]))


class ServerSide:
    """A server, whose processes are below `pid`, with a client in this process."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner, pid: int, vocab: int) -> None:
        self._client, self._runner, self._pid, self._vocab_size = client, runner, pid, vocab
        (model,) = runner.run(client.models())
        self._model = model.model

    def do(self, num_streams: int, number: int, work: BenchmarkWork) -> Turn:
        """Do some work, see Side."""
        prompts = random_prompts(work, num_streams, self._vocab_size, number)
        processor, wall = self._processor_seconds(), time.perf_counter()
        self._runner.run(self._ask_all(prompts, work.num_new_tokens))
        wall = time.perf_counter() - wall
        return Turn(self._processor_seconds() - processor, wall)

    def _processor_seconds(self) -> float:
        uses = read_tree(self._pid).values()
        return time.process_time() + sum(use.processor_seconds for use in uses)

    async def _ask_all(self, prompts: Sequence[Prompt], num_new_tokens: int) -> None:
        await asyncio.gather(*(self._ask(prompt, num_new_tokens) for prompt in prompts))

    async def _ask(self, prompt: Prompt, num_new_tokens: int) -> None:
        count = 0
        async for message in self._client.stream_events(
            self._model, prompt, max_new_tokens=num_new_tokens, ignore_eos=True
        ):
            count = message.summary.usage.output_tokens  # the last message has it
        if count != num_new_tokens:
            raise LoadTestError(f"asked for {num_new_tokens} tokens, got {count}")


@contextmanager
def engine_of(tree: Tree, limits: Limits) -> Iterator[EngineSide]:
    """Run a tree's engine in a process, until the end of the block."""
    package = str(tree.package.resolve())
    command = [sys.executable, "-P", "-c", _PROGRAM, package, *map(str, limits)]
    with LineProcess(command, env=environment(tree.path), cwd=tree.path) as process:
        yield EngineSide(process, tree)


@contextmanager
def server_of(tree: Tree, limits: Limits, vocab_size: int) -> Iterator[ServerSide]:
    """Run a tree's server, until the end of the block."""
    options = ["--max-num-seqs", f"{limits.num_seqs}"]
    package, threads = tree.package.resolve(), limits.num_threads
    with served(package, threads=threads, options=options, tree=tree.path) as server:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            client = runner.run(open_client(server.address))
            yield ServerSide(client, runner, server.pid, vocab_size)
            runner.run(client.close())


async def open_client(address: str) -> AsyncClient:
    """Return a client of the loop that this runs on."""
    return AsyncClient(address, timeout=600)


def take_turns(
    sides: Sequence[Side], num_streams: int, work: BenchmarkWork, seconds: float
) -> Turns:
    """Run the same work on all in turn; return the turns of each, after the first."""
    found: Turns = [[] for _ in sides]
    number, end = 0, time.monotonic() + seconds
    while number < 2 or time.monotonic() < end:
        for one in in_turn(range(len(sides)), number):
            turn = sides[one].do(num_streams, number, work)
            if number > 0:  # the first one warms up
                found[one].append(turn)
        number += 1
    return found


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--against",
    nargs=2,
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="TREE PACKAGE",
    help="An older checkout, and the same model as it exports it; may be given several times.",
)
@click.option("--served", "has_servers", is_flag=True, help="A server of every tree, too.")
@click.option(
    "--streams", default="1,8,32", show_default=True, callback=read_numbers, metavar="COUNT,..."
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seconds", type=float, default=30.0, show_default=True, help="A count of streams.")
@click.option(
    "--starts", type=click.IntRange(1), default=1, show_default=True, help="Starts of each."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    against: Sequence[tuple[Path, Path]],
    has_servers: bool,
    streams: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    threads: int,
    seconds: float,
    starts: int,
    out: Path,
) -> None:
    """Hold the engine of this checkout on PACKAGE against others; write OUT.json."""
    if not against and not has_servers:
        raise click.UsageError("nothing to compare with: give --against, --served or both")
    trees = [Tree(ROOT, package), *(Tree(*other) for other in against)]
    work = BenchmarkWork(num_prompt_tokens=prompt_tokens, num_new_tokens=new_tokens)
    limits = Limits(max(streams), threads)
    of_starts: dict[int, list[Turns]] = {count: [] for count in streams}
    for number in range(starts):
        with ExitStack() as stack:
            turned = -1 if number % 2 else 1  # the order of starts makes a difference, too
            engines = [stack.enter_context(engine_of(tree, limits)) for tree in trees[::turned]]
            sides: list[Side] = [*engines[::turned]]
            if has_servers:
                vocab_sizes = [engine.vocab_size for engine in engines[::turned]]
                for tree, size in zip(trees, vocab_sizes, strict=True):
                    sides.append(stack.enter_context(server_of(tree, limits, size)))
            for count in streams:
                of_starts[count].append(take_turns(sides, count, work, seconds / starts))
    pairs = pairs_of([tree.commit for tree in trees], has_servers)
    results = [result_of(count, pairs, found) for count, found in of_starts.items()]
    for result in results:
        _tell(result)
    write_result({"work": asdict(work), "threads": threads, "results": results}, out)


Pairs = dict[str, tuple[int, int]]  # two sides that are compared, by what they are called


def pairs_of(commits: Sequence[str], has_servers: bool) -> Pairs:
    """Return what is compared: the first tree with others, and every engine with its server."""
    pairs, servers = Pairs(), len(commits)  # they stand behind the engines
    for one, commit in enumerate(commits):
        if one:
            pairs[f"engine by engine of {commit}"] = (0, one)
        if one and has_servers:
            pairs[f"server by server of {commit}"] = (servers, servers + one)
        if has_servers:
            pairs[f"engine by server of {commit}"] = (one, servers + one)
    return pairs


def result_of(count: int, pairs: Pairs, of_starts: Sequence[Turns]) -> dict[str, object]:
    """Return what the turns of all starts tell, and what each of the starts does."""
    own = list(chain.from_iterable(turns[0] for turns in of_starts))
    return {
        "streams": count,
        "turns": len(own),
        "processor_seconds": statistics.median(turn.processor for turn in own),
        "wall_seconds": statistics.median(turn.wall for turn in own),
        "ratios": {
            name: {
                **_ratios("processor", [(turns[a], turns[b]) for turns in of_starts]),
                **_ratios("wall", [(turns[a], turns[b]) for turns in of_starts]),
            }
            for name, (a, b) in pairs.items()
        },
    }


def _ratios(
    time_of: str, of_starts: Sequence[tuple[Sequence[Turn], Sequence[Turn]]]
) -> dict[str, object]:
    """Return the geometric mean of the medians of all starts, and the ratios of each start."""
    found = [
        ratio_of([getattr(a, time_of) for a in ones], [getattr(b, time_of) for b in others])
        for ones, others in of_starts
    ]
    mean = statistics.geometric_mean(ratio.median for ratio in found)
    return {time_of: mean, f"{time_of}_by_start": [asdict(ratio) for ratio in found]}


def _tell(result: dict[str, object]) -> None:
    ratios = result["ratios"]
    assert isinstance(ratios, dict)
    for name, ratio in ratios.items():
        click.echo(
            f"{result['streams']} streams, {result['turns']} turns, {name}: "
            f"{ratio['processor']:.3f} of the processor time, {ratio['wall']:.3f} of the clock's"
        )
