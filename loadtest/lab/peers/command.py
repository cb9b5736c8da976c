"""The command: `python -m loadtest.lab peers --work gpt2 --concurrency 1,8,32 --out DIR`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from engine.machine import machine_name, num_cores
from loadtest.errors import LoadTestError
from loadtest.lab.peers.comparison import Plan, compare, start_process
from loadtest.lab.peers.results import Origin, Results, disagreements, summarize, write
from loadtest.lab.peers.works import WORKS
from loadtest.origin import code_commit, now


@click.command()
@click.option("--work", "name", type=click.Choice(list(WORKS)), required=True)
@click.option("--concurrency", default="1,8,32", show_default=True, metavar="N,...")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of every engine.  [default: one a core]")
@click.option(
    "--engine", "engines", multiple=True, help="Only engines whose name holds this; repeatable."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
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
    concurrency: str,
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
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        work=work,
        concurrencies=tuple(int(part) for part in concurrency.split(",")),
        num_rounds=rounds,
        num_threads=threads or num_cores(),
        vocab_size=int((directory / "vocab_size").read_text()),
        directory=directory.resolve(),
        seed=seed,
    )
    origin = Origin(
        work=work,
        command=shlex.join(["python", "-m", "loadtest.lab", *sys.argv[1:]]),
        commit=code_commit(),
        started_at=now(),
        machine=machine_name(),
        num_threads=plan.num_threads,
    )
    run = _compare_servers if work.are_servers else _compare
    run(plan, origin, directory / "workers.log", out)


def _compare(plan: Plan, origin: Origin, log: Path, out: Path) -> None:
    from loadtest.lab.peers.chart import write_png

    comparison = compare(plan, start_process(log), click.echo)
    results = Results(
        **vars(origin),
        lines=summarize(plan.work, comparison),
        disagreements=disagreements(comparison.agreements),
        comparison=comparison,
    )
    picture = out / f"{plan.work.name}.png"
    write_png(results, picture)
    _tell([*write(results, out), picture], results.disagreements)


def _compare_servers(plan: Plan, origin: Origin, log: Path, out: Path) -> None:
    from loadtest.lab.peers.server_comparison import compare_servers, start_server
    from loadtest.lab.peers.server_results import (
        ServerResults,
        summarize_servers,
        write_server_results,
    )

    comparison = compare_servers(plan, start_server(log), click.echo)
    results = ServerResults(
        **vars(origin),
        lines=summarize_servers(plan.work, comparison),
        disagreements=disagreements(comparison.agreements),
        comparison=comparison,
    )
    _tell(write_server_results(results, out), results.disagreements)


def _tell(files: Iterable[Path], disagreements: Iterable[str]) -> None:
    for path in files:
        click.echo(f"written: {path}")
    if found := "; ".join(disagreements):
        raise click.ClickException(f"outputs differ: {found}")


def _make_models(model: str, directory: Path) -> None:
    # In a process of its own: torch's memory and threads are gone with it.
    subprocess.run(
        [sys.executable, "-m", "loadtest.lab.peers.models", model, str(directory)], check=True
    )
