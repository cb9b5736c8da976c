"""The command: `python -m loadtest.lab peers --work gpt2 --concurrency 1,8,32 --out DIR`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click

from engine.machine import num_cores
from loadtest.errors import LoadTestError
from loadtest.lab.peers.chart import write_png
from loadtest.lab.peers.comparison import Plan, StartPeer, compare
from loadtest.lab.peers.engine_process import EngineProcess
from loadtest.lab.peers.results import disagreements, summarize, told
from loadtest.lab.peers.server_process import ServerProcess
from loadtest.lab.peers.works import WORKS, Work
from loadtest.lab.result import write_result
from server.cli.options import read_numbers


@click.command()
@click.option("--work", "name", type=click.Choice(list(WORKS)), required=True)
@click.option(
    "--concurrency", default="1,8,32", show_default=True, callback=read_numbers, metavar="N,..."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of every engine.  [default: one a core]"
)
@click.option(
    "--engine", "engines", multiple=True, help="Only engines whose name holds this; repeatable."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    default=Path("packages/peers"),
    show_default=True,
    help="Made once and kept here.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of results.")
def main(
    name: str,
    concurrency: tuple[int, ...],
    rounds: int,
    threads: int | None,
    engines: tuple[str, ...],
    seed: int,
    models: Path,
    out: Path,
) -> None:
    """Run the same work through Tokenweir and other engines in turn, and write what came out."""
    try:
        work = WORKS[name].of(engines)
    except LoadTestError as error:
        raise click.BadParameter(str(error), param_hint="--engine") from error
    directory = models / work.model
    _make_models(work.model, directory)
    plan = Plan(
        work=work,
        concurrencies=concurrency,
        num_rounds=rounds,
        num_threads=threads or num_cores(),
        vocab_size=int((directory / "vocab_size").read_text()),
        directory=directory.resolve(),
        seed=seed,
    )
    comparison = compare(plan, starter(work, directory / "workers.log"), click.echo)
    lines, found = summarize(work, comparison), disagreements(comparison.agreements)
    for line in lines:
        click.echo(told(line))
    content = {
        "work": asdict(work),
        "num_threads": plan.num_threads,
        "comparison": asdict(comparison),
        "lines": [*map(asdict, lines)],
        "disagreements": found,
    }
    written = write_result(content, out / name)
    click.echo(f"written: {written}")
    if any(line.ratio for line in lines):
        write_png(written, picture := out / f"{name}.png")
        click.echo(f"written: {picture}")
    if found:
        raise LoadTestError(f"outputs differ: {'; '.join(found)}")


def starter(work: Work, log: Path) -> StartPeer:
    """Return what starts the engines or servers of a work as processes that write to a log."""
    process = ServerProcess if work.are_servers else EngineProcess
    return lambda engine, options: process(engine.adapter, options, log)


def _make_models(model: str, directory: Path) -> None:
    # In a process of its own: torch's memory and threads are gone with it.
    subprocess.run(
        [sys.executable, "-m", "loadtest.lab.peers.models", model, str(directory)], check=True
    )
