"""The command that measures an engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from engine.config import Device, EngineConfig
from engine.machine import quota_notice
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.options import (
    any_path,
    examples,
    package_source,
    read_numbers,
)
from server.cli.progress import show_progress
from server.cli.serving.setting_options import engine_option
from server.cli.tables import print_table


@click.command(
    epilog=examples(
        "tokenweir bench packages/gpt2",
        "tokenweir bench packages/gpt2 --concurrency 1,32 --json bench.json",
        "tokenweir bench packages/marian --prompt-tokens 25 --new-tokens 32 --beam 4",
    ),
)
@click.argument("package", type=package_source)
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,8,32",
    show_default=True,
    callback=read_numbers,
    metavar="N,...",
    help="Requests at once; each is measured.",
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--strategy", type=click.Choice(["greedy", "topk"]), help="[default: greedy]")
@click.option("--beam", type=click.IntRange(2), metavar="WIDTH", help="Beam search instead.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the model.  [default: one a core]"
)
@engine_option("device")
@engine_option("gpu_memory_utilization")
@engine_option("decode_buckets")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of prompts and of sampling."
)
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
@needs("cpu")
def bench(
    package: Path | str,
    concurrencies: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    strategy: Literal["greedy", "topk"] | None,
    beam: int | None,
    rounds: int,
    threads: int | None,
    device: Device | None,
    gpu_memory_utilization: float,
    decode_buckets: tuple[int, ...],
    seed: int,
    json_file: Path | None,
) -> None:
    """Run PACKAGE on random prompts in this process: scheduler, model, sampler, detokenizer.

    A checkpoint, a directory of Hugging Face or ORG/NAME[@REVISION] of its Hub becomes one first.

    Every request has exactly --prompt-tokens and gets exactly --new-tokens. The rates are medians;
    decode steps are the time of the run less that of its prompts. If noise makes that less than
    their parts, as with tiny models, the shares are unclear.
    """
    # Not above: some installs lack what they need, and have the help.
    from loadtest.benchmark.run import run_benchmark
    from loadtest.benchmark.work import BenchmarkWork
    from loadtest.cli.benchmark_report import benchmark_tables, write_benchmark
    from loadtest.reports.report import check_place
    from server.packages.build import BuildOptions, build_package

    if beam is not None and strategy is not None:
        raise click.UsageError("give --strategy, or --beam for beam search")
    work = BenchmarkWork(
        num_prompt_tokens=prompt_tokens,
        num_new_tokens=new_tokens,
        strategy="beam" if beam is not None else strategy or "greedy",
        beam_width=beam or 1,
        seed=seed,
    )
    settings = EngineConfig(
        num_threads=threads or 0,
        max_num_seqs=max(decode_buckets, default=0),
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        decode_buckets=decode_buckets,
    )
    if json_file is not None:
        check_place(json_file)
    if notice := quota_notice():
        click.echo(notice, err=True)
    with cleaned_up():
        package = build_package(package, BuildOptions(device=device))
    with cleaned_up(), show_progress("Rounds") as progress:
        report = run_benchmark(
            package,
            work,
            concurrencies,
            num_rounds=rounds,
            settings=settings,
            progress=progress,
            tell=lambda line: click.echo(line, err=True),
        )
    for table in benchmark_tables(report):
        print_table(table)
    if json_file is not None:
        write_benchmark(report, json_file)
        click.echo(f"written: {json_file}")
