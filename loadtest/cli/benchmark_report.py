"""The outcome of `tokenweir bench`, as tables and as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from engine.machine import machine_name
from loadtest.benchmark.memory import Memory
from loadtest.benchmark.report import BenchmarkReport, ConcurrencyResult, DecodeStep
from loadtest.origin import code_commit, now, typed_command
from loadtest.result_file import write_document
from server.cli.tables import table_width, told_defaults

_LABEL_WIDTH, _VALUE_WIDTH = 20, 14  # a table of measurements, with borders


def write_benchmark(report: BenchmarkReport, path: Path) -> None:
    """Write every number of it, with where it comes from."""
    content = {
        "command": typed_command(),
        "commit": code_commit(),
        "machine": machine_name(),
        "written_at": now(),
        **TypeAdapter(BenchmarkReport).dump_python(report, mode="json"),
    }
    write_document(content, path)


def _threads(report: BenchmarkReport) -> str:
    used, given = report.num_decoder_threads, report.num_threads
    return f"{used} threads" if used == given else f"{used} of {given} threads: one a head"


def benchmark_tables(report: BenchmarkReport) -> Iterator[Table]:
    """Yield what a benchmark measured: a column a concurrency, as many as fit beside each other."""
    work = report.work
    kind = f"beam {work.beam_width}" if work.strategy == "beam" else work.strategy
    width = table_width() or Console().width
    num_columns = max(1, (width - _LABEL_WIDTH) // _VALUE_WIDTH)
    for start in range(0, len(report.results), num_columns):
        results = report.results[start : start + num_columns]
        table = Table(
            title=f"{report.package}, weights {report.weights}: {work.num_prompt_tokens} prompt "
            f"tokens, {work.num_new_tokens} new, {kind}, {_threads(report)}",
            caption=_loading(report),
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("at once", no_wrap=True)
        for result in results:
            table.add_column(str(result.concurrency), justify="right", no_wrap=True)
        columns = [list(_measured(result)) for result in results]
        for cells in zip(*columns, strict=True):
            table.add_row(cells[0][0], *(value for _, value in cells))
        yield table


def _measured(result: ConcurrencyResult) -> Iterator[tuple[str, str]]:
    yield "tokens/s", f"{result.tokens_per_second:.1f}"
    yield "prefill tokens/s", f"{result.prefill_tokens_per_second:.1f}"
    step = result.decode_step
    yield "decode step", "-" if step is None else f"{step.total * 1000:.2f} ms"
    for name in ("model", "sampling", "scheduling", "rest"):
        yield f"  {name}", "-" if step is None else _share(step, name)
    yield "cache in use", _megabytes(result.cache_bytes)
    yield "memory", _megabytes(result.memory.resident)
    yield "memory, peak", _megabytes(result.memory.peak)


def _share(step: DecodeStep, name: str) -> str:
    """Return the share of a step; none can be told where noise has made it less than its parts."""
    return "unclear" if step.rest < 0 else f"{getattr(step, name) / step.total:.1%}"


def _loading(report: BenchmarkReport) -> str:
    memory: Memory = report.memory_loaded
    given = report.package_defaults
    defaults = f"; not used: the package's defaults, {told_defaults(given)}" if given else ""
    return (
        f"loaded in {report.load_seconds:.2f} s: weights {_megabytes(report.weight_bytes)}, memory "
        f"{_megabytes(memory.resident)}, peak {_megabytes(memory.peak)} "
        f"(before: {_megabytes(report.memory_before.resident)}){defaults}"
    )


def _megabytes(value: int | None) -> str:
    return "?" if value is None else f"{value / 1e6:.1f} MB"
