"""The commands that measure: a running server, or an engine alone."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from server.cli.exit_codes import DONE, FAILED, CommandError
from server.cli.interruption import cleaned_up
from server.cli.options import (
    Number,
    any_path,
    decode_buckets_option,
    device_option,
    examples,
    existing_directory,
    existing_file,
    gpu_memory_option,
    model_option,
    read_numbers,
    server_option,
    timeout_option,
)
from server.cli.typed_dates import TYPED_DATES

if TYPE_CHECKING:
    from engine.benchmark import BenchmarkReport
    from engine.config import Device
    from loadtest.runner import LoadReport
    from loadtest.workload import Arrival, LoadConfig


@click.command(
    short_help="Measure latencies and throughput of a server.",
    epilog=examples(
        "tokenweir loadtest --model dates --concurrency 16 --requests 500",
        "tokenweir loadtest --model dates --prompts dates.txt --rate 50 "
        "--requests 1000 --json run.json --png run.png",
    ),
)
@model_option
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Closed loop: so many streams at any time.  [default: 8, without --rate]",
)
@click.option(
    "--rate",
    type=Number(min=0, min_open=True),
    metavar="PER_SECOND",
    help="Open loop: requests start at this rate whatever the server does.",
)
@click.option(
    "--arrival",
    type=click.Choice(["poisson", "constant"]),
    default="poisson",
    show_default=True,
    help="Pattern of the open loop.",
)
@click.option(
    "--prompts",
    type=existing_file,
    help="UTF-8 text, a prompt a line; for a model of images, their paths.  [default: typed dates]",
)
@click.option("--max-new-tokens", type=click.IntRange(1), help="Of each request.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and prompts.")
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
@click.option("--png", "png_file", type=any_path, help="Draw the latency distributions here.")
@timeout_option
@server_option
def loadtest(
    model: str,
    requests: int,
    concurrency: int | None,
    rate: float | None,
    arrival: Arrival,
    prompts: Path | None,
    max_new_tokens: int | None,
    seed: int,
    json_file: Path | None,
    png_file: Path | None,
    timeout: float,
    server: str,
) -> int:
    """Stream many requests and print latencies, throughput and errors; exit with 1 if one failed.

    Latencies count from the time a request was due, so a server that falls behind cannot hide it:
    TTFT (first token), ITL (between tokens), TPOT (per token of a request), end to end. Prompts
    are used in turn, and what a server keeps of one makes its next turn faster. Ctrl-C ends the
    test and reports what was answered.
    """
    if concurrency is not None and rate is not None:
        raise click.UsageError("give --rate for an open loop, or --concurrency for a closed one")
    from loadtest.workload import LoadConfig, read_prompts

    config = LoadConfig(
        address=server,
        model=model,
        prompts=tuple(TYPED_DATES) if prompts is None else read_prompts(prompts),
        num_requests=requests,
        rate=rate,
        arrival=arrival,
        concurrency=concurrency or 8 if rate is None else None,
        seed=seed,
        timeout=timeout,
        options={} if max_new_tokens is None else {"max_new_tokens": max_new_tokens},
    )
    with cleaned_up() as interruption:
        report = report_load_test(config, json_file, png_file)
    for path in filter(None, (json_file, png_file)):
        click.echo(f"written: {path}")
    if report.interrupted:
        return interruption.exit_code
    if failed := num_failed(report):
        raise CommandError(f"{failed} of {len(report.records)} requests failed", FAILED)
    return DONE


@click.command(
    short_help="Measure the engine on a package, without a server.",
    epilog=examples(
        "tokenweir bench packages/gpt2",
        "tokenweir bench packages/marian --concurrency 1,32 --prompt-tokens 25 --new-tokens 32 "
        "--beam 4 --json bench.json",
    ),
)
@click.argument("package", type=existing_directory)
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
@click.option("--threads", type=click.IntRange(1), help="Of the model.  [default: one a core]")
@device_option
@gpu_memory_option
@decode_buckets_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and draws.")
@click.option("--json", "json_file", type=any_path, help="Write every number here.")
def bench(
    package: Path,
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

    Every request has exactly so many prompt tokens and gets exactly so many new ones. The rates are
    medians; a decode step is what the work takes beyond its prompts.
    """
    if beam is not None and strategy is not None:
        raise click.UsageError("give --strategy, or --beam for beam search")
    from engine.benchmark import BenchmarkWork, run_benchmark
    from engine.config import EngineConfig
    from server.cli.progress import show_progress
    from server.cli.tables import benchmark_tables, print_table

    if json_file is not None:
        from loadtest.report import check_place

        check_place(json_file)
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
        _write_benchmark(report, json_file)
        click.echo(f"written: {json_file}")


def _write_benchmark(report: BenchmarkReport, path: Path) -> None:
    from pydantic import TypeAdapter

    from engine.benchmark import BenchmarkReport
    from engine.machine import machine_name
    from loadtest.origin import code_commit, now
    from loadtest.result_file import write_document

    content = {
        "command": _command(),
        "commit": code_commit(),
        "machine": machine_name(),
        "written_at": now(),
        **TypeAdapter(BenchmarkReport).dump_python(report, mode="json"),
    }
    write_document(content, path)


def report_load_test(
    config: LoadConfig, json_file: Path | None, png_file: Path | None
) -> LoadReport:
    """Run a load test, print its table, write its files."""
    from engine.machine import machine_name
    from loadtest.origin import code_commit
    from loadtest.report import check_place, print_table, write_json
    from loadtest.runner import run
    from server.cli.progress import show_progress

    for path in filter(None, (json_file, png_file)):
        check_place(path)
    if png_file is not None:  # what it needs is missed before the test, not behind it
        from loadtest.plots import write_png
    with show_progress("Requests") as progress:
        report = run(config, progress)
    report = replace(report, command=_command(), commit=code_commit(), machine=machine_name())
    print_table(report)
    if json_file is not None:
        write_json(report, json_file)
    if png_file is not None:
        write_png(report, png_file)
    return report


def num_failed(report: LoadReport) -> int:
    """Return how many requests were answered with an error."""
    return sum(not record.ok for record in report.records)


def _command() -> str:
    return shlex.join(["tokenweir", *sys.argv[1:]])
