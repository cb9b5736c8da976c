"""The study of swaps: versions of a model are loaded and unloaded one after the other under load.

`python -m loadtest.studies.swaps packages/dates --out loadtest/results/swaps`

Every swap loads the next version beside the one that serves, gives it 5, 50 and 100 percent of the
calls, and unloads the other. Meanwhile a closed loop asks. Counted are calls that fail, and the
memory of all processes of the server, before the load and after it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import click
from tokenweir import AsyncClient, TokenweirClientError

from engine.package.package import read_manifest, write_manifest
from loadtest.lab.result import write_result
from loadtest.lab.serve import Served, served
from loadtest.studies.idle import read_tree

SETTINGS = "[log]\nrequests = false\n[admin]\nport = 0\n"
_SHARES = (5, 50, 100)
_PROMPTS = ("3rd of Feb, 1998", "le 7 juillet 2004", "tuesday 14 october 2031", "1/2/2003")


@dataclass
class Answers:
    """The answers in the closed loop."""

    by_version: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@contextmanager
def under_version(package: Path, version: str) -> Iterator[Path]:
    """Make a copy of a package under another version, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "package"
        shutil.copytree(package, copy)
        write_manifest(read_manifest(package).model_copy(update={"version": version}), copy)
        yield copy


@contextmanager
def asking(address: str, model: str, streams: int, answers: Answers) -> Iterator[None]:
    """Ask in so many closed loops meanwhile; on an event loop."""

    async def ask() -> None:
        number = 0
        async with AsyncClient(address, max_attempts=1) as client:
            while True:
                number += 1
                try:
                    answer = await client.generate(model, _PROMPTS[number % len(_PROMPTS)])
                    answers.by_version[answer.provenance.model_version] += 1
                except TokenweirClientError as error:
                    answers.failures.append(str(error))

    tasks = [asyncio.create_task(ask()) for _ in range(streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def swap(admin: AsyncClient, package: Path, model: str, old: str, new: str) -> None:
    """Put a new version in the place of an old one."""
    with under_version(package, new) as copy:
        await admin.load_model(str(copy), model=model, share=_SHARES[0])
        for share in _SHARES[1:]:
            await asyncio.sleep(0.2)
            await admin.set_traffic(model, new, share)
        await admin.unload_model(model, old)


def memory(pid: int) -> tuple[int, dict[str, int]]:
    """Return the memory of a process and all below it, in bytes: the sum, and by name."""
    by_name: Counter[str] = Counter()
    for use in read_tree(pid).values():
        by_name[use.name.split(":tokenweir")[0]] += use.memory
    return by_name.total(), dict(by_name.most_common())


async def measure(
    server: Served, package: Path, num_swaps: int, streams: int, settle: float
) -> dict[str, object]:
    manifest = read_manifest(package)
    names = [manifest.version, *(f"swap-{number}" for number in range(1, num_swaps + 1))]
    assert server.admin is not None, "the settings open it"
    seen, seconds, answers = [], [], Answers()
    async with AsyncClient(server.admin) as admin:
        with asking(server.address, manifest.name, streams, answers):
            await asyncio.sleep(settle)
        await asyncio.sleep(settle)
        before = memory(server.pid)
        with asking(server.address, manifest.name, streams, answers):
            for old, new in pairwise(names):
                started = time.monotonic()
                await swap(admin, package, manifest.name, old, new)
                seconds.append(time.monotonic() - started)
                seen.append(memory(server.pid)[0])
        await asyncio.sleep(settle)
    after = memory(server.pid)
    return {
        "streams": streams,
        "swaps": num_swaps,
        "seconds_of_swaps": seconds,
        "answers": answers.by_version.total(),
        "answers_by_version": dict(answers.by_version),
        "failed": len(answers.failures),
        "first_failures": answers.failures[:10],
        "growth": after[0] - before[0],
        "memory_before": before[1],
        "memory_after": after[1],
        "memory_behind_swaps": seen,
    }


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--swaps", type=click.IntRange(1), default=50, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=4, show_default=True)
@click.option("--settle", type=float, default=15.0, show_default=True, help="Seconds.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(package: Path, swaps: int, streams: int, settle: float, out: Path) -> None:
    """Swap versions of PACKAGE under load; write OUT.json."""
    with served(package, SETTINGS) as server:
        found = asyncio.run(measure(server, package, swaps, streams, settle))
    write_result(found, out)
    click.echo(
        f"{swaps} swaps: {found['answers']} answers, {found['failed']} failed, memory "
        f"{found['growth'] / 2**20:+.1f} MiB"  # type: ignore[operator]
    )


if __name__ == "__main__":
    main()
