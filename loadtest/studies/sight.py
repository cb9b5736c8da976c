"""The study of sight: what lines of requests and metrics cost a server.

`python -m loadtest.studies.sight packages/dates --out loadtest/results/sight`

Two servers of the same package run at once. One writes a line for every request, and its metrics
are read in every turn; the other one does neither. They get the same closed loop in turns, each of
them first as often as the other. Compared is what stands next to each other: the median of the
ratios of a turn, of answers a second and of processor time a request, that of all processes of a
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tokenweir import AsyncClient

from loadtest.studies.heading import write_result
from loadtest.studies.idle import read_tree
from loadtest.studies.served import Served, served

_SCRAPE_PERIOD = 15.0  # seconds; what most set up Prometheus with
_SETTINGS = {
    "without": "[log]\nrequests = false\n",
    "with": "[log]\nrequests = true\n[metrics]\nport = 0\n",
}


@dataclass(frozen=True)
class Turn:
    """Measurements of a server in its turn."""

    requests_per_second: float
    processor_seconds: float  # a request, of all its processes


async def take_turn(
    server: Served, model: str, prompt: str, streams: int, seconds: float, period: float
) -> Turn:
    """Ask a server with so many streams for so long; read its metrics every period of seconds."""
    before, started, count = _processor(server.pid), time.monotonic(), 0
    end = started + seconds
    async with AsyncClient(server.address, timeout=60) as client:

        async def ask() -> None:
            nonlocal count
            while time.monotonic() < end:
                await client.generate(model, prompt)
                count += 1

        reading = asyncio.create_task(_read_again_and_again(server.page, period))
        await asyncio.gather(*(ask() for _ in range(streams)))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    elapsed = time.monotonic() - started
    return Turn(count / elapsed, (_processor(server.pid) - before) / count)


async def _read_again_and_again(page: str | None, period: float) -> None:
    while page is not None:
        await asyncio.to_thread(lambda: urllib.request.urlopen(page, timeout=10).read())
        await asyncio.sleep(period)


def _processor(pid: int) -> float:
    return sum(use.processor_seconds for use in read_tree(pid).values())


def ratios(watched: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, float]:
    """Return what is left of the answers, and what a request costs, by that without."""
    pairs = list(zip(watched, plain, strict=True))
    answers = [one.requests_per_second / other.requests_per_second for one, other in pairs]
    processor = [one.processor_seconds / other.processor_seconds for one, other in pairs]
    return {
        "requests_per_second": statistics.median(answers),
        "requests_per_second_least": min(answers),
        "requests_per_second_most": max(answers),
        "processor_seconds": statistics.median(processor),
    }


async def _measure(
    servers: Sequence[Served],
    model: str,
    prompt: str,
    streams: int,
    seconds: float,
    turns: int,
    period: float,
) -> list[list[Turn]]:
    found: list[list[Turn]] = [[] for _ in servers]
    for number in range(turns + 1):
        for place in range(len(servers)):
            one = (place + number) % len(servers)
            turn = await take_turn(servers[one], model, prompt, streams, seconds, period)
            if number > 0:  # the first one warms up
                found[one].append(turn)
    return found


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", default="3rd of Feb, 1998", show_default=True)
@click.option("--streams", type=click.IntRange(1), default=32, show_default=True)
@click.option("--seconds", type=float, default=15.0, show_default=True, help="A turn.")
@click.option(
    "--period",
    type=click.FloatRange(0.1),
    default=_SCRAPE_PERIOD,
    show_default=True,
    help="Seconds from one reading of the metrics to the next. Every turn begins with one.",
)
@click.option("--turns", type=click.IntRange(1), default=10, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    prompt: str,
    streams: int,
    seconds: float,
    turns: int,
    period: float,
    out: Path,
) -> None:
    """Serve PACKAGE with and without lines of requests and metrics; write OUT.json."""
    from engine.package.package import read_manifest

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(package, one)) for one in _SETTINGS.values()]
        model = read_manifest(package).name
        plain, watched = asyncio.run(
            _measure(servers, model, prompt, streams, seconds, turns, period)
        )
    found = ratios(watched, plain)
    content = {
        "streams": streams,
        "turn_seconds": seconds,
        "period_seconds": period,
        "ratios": found,
        "with": [asdict(turn) for turn in watched],
        "without": [asdict(turn) for turn in plain],
    }
    write_result("loadtest.studies.sight", content, out)
    click.echo(
        f"with lines and metrics {found['requests_per_second']:.3f} of the answers a second "
        f"({found['requests_per_second_least']:.3f} to {found['requests_per_second_most']:.3f}), "
        f"{found['processor_seconds']:.3f} of the processor time a request"
    )


if __name__ == "__main__":
    main()
