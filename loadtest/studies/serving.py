"""The study of serving: what a server leaves of the tokens a second that `tokenweir bench` counts.

`python -m loadtest.studies.serving packages/gpt2 --out loadtest/results/serving-gpt2`

A server and an engine in this process have the same package and the same threads, and one of them
has work at a time. In turns they get a burst of requests: prompts of random tokens, other ones in
every turn, and a fixed number of greedy tokens behind each. The server streams every answer by
gRPC to a client that shares the machine with it, and reads messages as the load test does.
Compared is what stands next to each other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
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
from loadtest.studies.heading import write_result
from loadtest.studies.served import served


@dataclass(frozen=True)
class Share:
    """Tokens a second at so many streams, by turn, of the server and of the engine alone."""

    num_streams: int
    served: tuple[float, ...]
    engine: tuple[float, ...]

    def ratio(self) -> dict[str, float]:
        """Return what is left of the engine's: the median, least and largest of the turns."""
        left = [one / other for one, other in zip(self.served, self.engine, strict=True)]
        return {"median": statistics.median(left), "least": min(left), "most": max(left)}


class Pair:
    """A server and an engine, which get the same work."""

    def __init__(
        self,
        bench: EngineBench,
        client: AsyncClient,
        model: str,
        vocab_size: int,
        tokens_per_message: int = 1,
    ) -> None:
        self._bench, self._client, self._model = bench, client, model
        self._vocab_size, self._tokens_per_message = vocab_size, tokens_per_message
        self._number = 0  # of the next burst: no prompt comes twice

    async def share(self, work: BenchmarkWork, num_streams: int, turns: int) -> Share:
        """Take so many turns behind one that warms up."""
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns + 1):
            for at_server in (turn % 2 == 0, turn % 2 == 1):
                rate = await self._rate(work, num_streams, at_server)
                if turn > 0:
                    found[at_server].append(rate)
        return Share(num_streams, tuple(found[True]), tuple(found[False]))

    async def _rate(self, work: BenchmarkWork, num_streams: int, at_server: bool) -> float:
        prompts = random_prompts(work, num_streams, self._vocab_size, self._number)
        self._number += 1
        started = time.perf_counter()
        if at_server:
            counts = await asyncio.gather(*(self._ask(one, work) for one in prompts))
        else:
            measured = await self._bench.measure(
                prompts, lambda index: work.params(index, work.num_new_tokens)
            )
            counts = [len(answer.token_ids) for answer in measured.answers]
        return sum(counts) / (time.perf_counter() - started)

    async def _ask(self, prompt: Prompt, work: BenchmarkWork) -> int:
        count = 0
        async for message in self._client.stream_events(
            self._model,
            prompt,
            max_new_tokens=work.num_new_tokens,
            ignore_eos=True,
            tokens_per_message=self._tokens_per_message,
        ):
            count = message.summary.usage.output_tokens  # of the last message
        return count


async def _measure(
    path: Path,
    address: str,
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
        async with AsyncClient(address, timeout=600) as client:
            name, vocab_size = package.manifest.name, contract.vocab_size
            pair = Pair(bench, client, name, vocab_size, tokens_per_message)
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
            _measure(package, server.address, work, counts, tokens_per_message, threads, turns)
        )
    content = {
        "work": asdict(work),
        "tokens_per_message": tokens_per_message,
        "threads": threads,
        "shares": [{**asdict(share), "ratio": share.ratio()} for share in shares],
    }
    write_result("loadtest.studies.serving", content, out)
    for share in shares:
        ratio = share.ratio()
        click.echo(
            f"{share.num_streams} at once: {statistics.median(share.served):.0f} tokens/s served, "
            f"{statistics.median(share.engine):.0f} by the engine alone: {ratio['median']:.3f} "
            f"({ratio['least']:.3f} to {ratio['most']:.3f})"
        )


if __name__ == "__main__":
    main()
