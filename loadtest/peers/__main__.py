"""The command: `python -m loadtest.peers --work gpt2 --concurrency 1,8,32 --rounds 5 --out DIR`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click

from engine.machine import machine_name
from loadtest.origin import code_commit, now
from loadtest.peers.comparison import Plan, compare, start_process
from loadtest.peers.results import Results, disagreements, summarize, write
from loadtest.peers.works import WORKS


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
    work = WORKS[name]
    directory = models / work.model
    _make_models(work.model, directory)
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        work=work,
        concurrencies=tuple(int(part) for part in concurrency.split(",")),
        num_rounds=rounds,
        num_threads=threads or len(os.sched_getaffinity(0)),
        vocab_size=int((directory / "vocab_size").read_text()),
        directory=directory.resolve(),
        seed=seed,
        engines=engines,
    )
    started_at = now()
    comparison = compare(plan, start_process(directory / "workers.log"), click.echo)
    results = Results(
        work=work,
        command=shlex.join(["python", "-m", "loadtest.peers", *sys.argv[1:]]),
        commit=code_commit(),
        started_at=started_at,
        machine=machine_name(),
        num_threads=plan.num_threads,
        lines=summarize(work, comparison),
        disagreements=disagreements(comparison.agreements),
        comparison=comparison,
    )
    _write(results, out)


def _write(results: Results, out: Path) -> None:
    from loadtest.peers.chart import write_png

    picture = out / f"{results.work.name}.png"
    write_png(results, picture)
    for path in (*write(results, out), picture):
        click.echo(f"written: {path}")
    if results.disagreements:
        raise click.ClickException("outputs differ: " + "; ".join(results.disagreements))


def _make_models(model: str, directory: Path) -> None:
    # In a process of its own: torch's memory and threads are gone with it.
    subprocess.run(
        [sys.executable, "-m", "loadtest.peers.models", model, str(directory)], check=True
    )


if __name__ == "__main__":
    main()
