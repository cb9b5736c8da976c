"""The study of serving: what a server leaves of the tokens a second that `tokenweir bench` counts.

`python -m loadtest.lab served packages/gpt2 --out loadtest/results/serving-gpt2`

A server and an engine in this process have the same package and the same threads, and one of them
has work at a time. In turns they get a burst of requests: prompts of random tokens, other ones in
every turn, and a fixed number of greedy tokens behind each. The server streams every answer by
gRPC to a client that shares the machine with it, and reads messages as the load test does.
Neighbouring bursts are compared. The processor time of every process says where the rest goes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import uvloop
from tokenweir import AsyncClient

from engine.config import EngineConfig
from engine.package.package import load_package
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.work import (
    BenchmarkWork,
    Prompt,
    check_fits,
    generation_contract,
    random_prompts,
)
from loadtest.lab.process_tree import read_tree
from loadtest.lab.result import write_result
from loadtest.lab.serve import Served, served


@dataclass(frozen=True)
class Burst:
    """One burst of requests."""

    tokens_per_second: float
    processor_ms: Mapping[str, float]  # a token, by what a process is called


@dataclass(frozen=True)
class Share:
    """Bursts of so many streams, by turn, of the server and of the engine alone."""

    num_streams: int
    served: tuple[Burst, ...]
    engine: tuple[Burst, ...]

    def rates(self) -> dict[str, list[float]]:
        """Return the tokens a second of every turn."""
        return {
            "served": [burst.tokens_per_second for burst in self.served],
            "engine": [burst.tokens_per_second for burst in self.engine],
        }

    def ratio(self) -> dict[str, float]:
        """Return what is left of the engine's: the median, least and largest of the turns."""
        rates = self.rates()
        left = [one / other for one, other in zip(rates["served"], rates["engine"], strict=True)]
        return {"median": statistics.median(left), "least": min(left), "most": max(left)}

    def processor_ms(self) -> dict[str, dict[str, float]]:
        """Return the processor time that a token takes, by process: medians of the turns."""
        return {"served": _medians(self.served), "engine": _medians(self.engine)}


def _medians(bursts: Sequence[Burst]) -> dict[str, float]:
    names = dict.fromkeys(name for burst in bursts for name in burst.processor_ms)
    found = {
        name: statistics.median(burst.processor_ms.get(name, 0.0) for burst in bursts)
        for name in names
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class Pair:
    """A server, whose processes are below `server_pid`, and an engine, which get the same work."""

    def __init__(
        self,
        bench: EngineBench,
        client: AsyncClient,
        model: str,
        vocab_size: int,
        server_pid: int,
        tokens_per_message: int = 1,
    ) -> None:
        self._bench, self._client, self._model = bench, client, model
        self._server_pid = server_pid
        self._vocab_size, self._tokens_per_message = vocab_size, tokens_per_message
        self._number = 0  # the next burst's: no prompt comes twice

    async def share(self, work: BenchmarkWork, num_streams: int, turns: int) -> Share:
        """Take so many turns behind one that warms up."""
        found: dict[bool, list[Burst]] = {True: [], False: []}
        for turn in range(turns + 1):
            for at_server in (turn % 2 == 0, turn % 2 == 1):
                burst = await self._burst(work, num_streams, at_server)
                if turn > 0:
                    found[at_server].append(burst)
        return Share(num_streams, tuple(found[True]), tuple(found[False]))

    async def _burst(self, work: BenchmarkWork, num_streams: int, at_server: bool) -> Burst:
        prompts = random_prompts(work, num_streams, self._vocab_size, self._number)
        self._number += 1
        before = self._processor_seconds()
        started = time.perf_counter()
        if at_server:
            counts = await asyncio.gather(*(self._ask(one, work) for one in prompts))
        else:
            measured = await self._bench.measure(
                prompts, lambda index: work.params(index, work.num_new_tokens)
            )
            counts = [len(answer.token_ids) for answer in measured.answers]
        rate = sum(counts) / (time.perf_counter() - started)
        used = {
            name: 1000 * (seconds - before.get(name, 0.0)) / sum(counts)
            for name, seconds in self._processor_seconds().items()
        }
        return Burst(rate, used)

    def _processor_seconds(self) -> dict[str, float]:
        """Return what processes of one name have used; that of the client has the engine too."""
        used = {"client or engine": time.process_time()}
        for process in read_tree(self._server_pid).values():
            used[process.name] = used.get(process.name, 0.0) + process.processor_seconds
        return used

    async def _ask(self, prompt: Prompt, work: BenchmarkWork) -> int:
        count = 0
        async for message in self._client.stream_events(
            self._model,
            prompt,
            max_new_tokens=work.num_new_tokens,
            ignore_eos=True,
            tokens_per_message=self._tokens_per_message,
        ):
            count = message.summary.usage.output_tokens  # the last message has it
        return count


async def _measure(
    path: Path,
    server: Served,
    work: BenchmarkWork,
    streams: Sequence[int],
    tokens_per_message: int,
    threads: int,
    turns: int,
) -> list[Share]:
    package = load_package(path)
    contract = generation_contract(package)
    check_fits(work, contract)
    settings = EngineConfig(num_threads=threads)
    bench = EngineBench.load(package, max_num_seqs=max(streams), settings=settings)
    await bench.start()
    try:
        async with AsyncClient(server.address, timeout=600) as client:
            name, vocab_size = package.manifest.name, contract.vocab_size
            pair = Pair(bench, client, name, vocab_size, server.pid, tokens_per_message)
            return [await pair.share(work, num_streams, turns) for num_streams in streams]
    finally:
        await bench.stop()


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--streams", default="1,8,32", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--tokens-per-message", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=10, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    streams: str,
    prompt_tokens: int,
    new_tokens: int,
    tokens_per_message: int,
    threads: int,
    turns: int,
    out: Path,
) -> None:
    """Serve PACKAGE, hold it against the engine alone, and write OUT.json."""
    counts = [int(count) for count in streams.split(",")]
    work = BenchmarkWork(prompt_tokens, new_tokens)
    settings = f"[engine]\nmax_num_seqs = {max(counts)}\n"
    with served(package, settings, threads=threads) as server:
        shares = uvloop.run(
            _measure(package, server, work, counts, tokens_per_message, threads, turns)
        )
    content = {
        "work": asdict(work),
        "tokens_per_message": tokens_per_message,
        "threads": threads,
        "shares": [
            {
                "num_streams": share.num_streams,
                **share.rates(),
                "ratio": share.ratio(),
                "processor_ms_per_token": share.processor_ms(),
            }
            for share in shares
        ],
    }
    write_result(content, out)
    for share in shares:
        ratio = share.ratio()
        served_rate, alone = map(statistics.median, share.rates().values())
        click.echo(
            f"{share.num_streams} at once: {served_rate:.0f} tokens/s served, "
            f"{alone:.0f} by the engine alone: {ratio['median']:.3f} "
            f"({ratio['least']:.3f} to {ratio['most']:.3f})"
        )
