"""Tables on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from engine.benchmark import BenchmarkReport, ConcurrencyResult, Memory
    from engine.package import Certificate, Loss, Manifest
    from server.client import ModelInfo


def print_table(table: Table) -> None:
    """Print a table to the standard output, as wide as the terminal allows."""
    # Into a pipe or a file there is no width to keep to.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on the standard error while the block runs; yield what moves it: done, total."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def certificate_table(manifest: Manifest, certificate: Certificate) -> Table:
    """Return the certificate of a package, one fact a row."""
    c = certificate
    table = Table(title=f"Certificate of {manifest.name} {manifest.version}", show_header=False)
    table.add_row("model", f"{manifest.architecture}, {manifest.task}")
    cache = f", KV cache {manifest.generation.cache.dtype}" if manifest.generation else ""
    table.add_row("target", f"{manifest.target}, weights {manifest.weights}{cache}")
    table.add_row("cases compared with PyTorch", f"{c.cases:,}")
    if c.tokens_compared:
        table.add_row("greedy tokens equal", f"{c.tokens_equal:,} of {c.tokens_compared:,}")
    table.add_row(
        "largest logit difference", f"{c.max_abs_logit_diff:.2e} (allowed {c.tolerance:.0e})"
    )
    if c.max_abs_alignment_diff is not None:
        table.add_row("largest alignment difference", _alignment_difference(c))
    if c.loss is not None:
        for name, value in _loss(c.loss):
            table.add_row(name, value)
    table.add_row("rows bit-equal alone and in a batch", "yes" if c.batch_invariant else "no")
    for name, covered in c.covered.items():
        table.add_row(name.replace("_", " "), _covered(name, covered))
    table.add_row("made with", ", ".join(f"{k} {v}" for k, v in manifest.toolchain.items()))
    return table


def _alignment_difference(certificate: Certificate) -> str:
    allowed = certificate.alignment_tolerance
    limit = "" if allowed is None else f" (allowed {allowed:.0e})"
    return f"{certificate.max_abs_alignment_diff:.2e}{limit}"


def _loss(loss: Loss) -> Iterator[tuple[str, str]]:
    yield "mean logit difference", f"{loss.mean_abs_logit_diff:.2e} (std {loss.logit_std:.2e})"
    yield "greedy tokens that may differ", f"{loss.max_token_loss:.0%}"
    if loss.perplexity is not None and loss.eager_perplexity is not None:
        rise = loss.perplexity / loss.eager_perplexity - 1
        yield (
            "perplexity",
            f"{loss.perplexity:.4g}, of the eager model {loss.eager_perplexity:.4g}: "
            f"{rise:+.2%} on {loss.text_tokens:,} tokens (allowed {loss.max_perplexity_loss:+.0%})",
        )


def _covered(name: str, covered: list[int] | int) -> str:
    if isinstance(covered, int):
        return f"{covered:,}"
    if name == "prefill_chunks":
        return ", ".join(str(size or "whole prompt") for size in covered)
    if len(covered) > 12:
        return f"{len(covered)} values, {min(covered)} to {max(covered)}"
    return ", ".join(map(str, covered))


def _threads(report: BenchmarkReport) -> str:
    used, given = report.num_decoder_threads, report.num_threads
    return f"{used} threads" if used == given else f"{used} of {given} threads: one a head"


def benchmark_table(report: BenchmarkReport) -> Table:
    """Return what a benchmark measured, one concurrency a row."""
    work = report.work
    kind = f"beam {work.beam_width}" if work.strategy == "beam" else work.strategy
    table = Table(
        title=f"{report.package}, weights {report.weights}: {work.num_prompt_tokens} prompt "
        f"tokens, {work.num_new_tokens} new, {kind}, {_threads(report)}",
        caption=_loading(report),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("at once", "tokens/s", "prefill tokens/s", "decode step", "model", "sampling"):
        table.add_column(name, justify="right")
    for name in ("scheduling", "rest", "cache in use", "memory", "peak"):
        table.add_column(name, justify="right")
    for result in report.results:
        table.add_row(
            str(result.concurrency),
            f"{result.tokens_per_second:.1f}",
            f"{result.prefill_tokens_per_second:.1f}",
            *_step_cells(result),
            _megabytes(result.cache_bytes),
            _megabytes(result.memory.resident),
            _megabytes(result.memory.peak),
        )
    return table


def _step_cells(result: ConcurrencyResult) -> list[str]:
    step = result.decode_step
    if step is None:
        return ["-"] * 5
    parts = (step.model, step.sampling, step.scheduling, step.rest)
    return [f"{step.total * 1000:.2f} ms", *(f"{part / step.total:.1%}" for part in parts)]


def _loading(report: BenchmarkReport) -> str:
    memory: Memory = report.memory_loaded
    return (
        f"loaded in {report.load_seconds:.2f} s: weights {_megabytes(report.weight_bytes)}, memory "
        f"{_megabytes(memory.resident)}, peak {_megabytes(memory.peak)} "
        f"(before: {_megabytes(report.memory_before.resident)})"
    )


def _megabytes(value: int | None) -> str:
    return "?" if value is None else f"{value / 1e6:.1f} MB"


def models_table(models: Iterable[ModelInfo]) -> Table:
    """Return the models of a server, one a row."""
    table = Table()
    for name in ("model", "version", "state", "architecture", "capabilities", "limits", "parity"):
        table.add_column(name)
    for model in models:
        table.add_row(
            model.model,
            model.model_version,
            model.state,
            model.architecture,
            ", ".join(model.capabilities),
            _limits(model),
            _parity(model),
        )
    return table


def _limits(model: ModelInfo) -> str:
    parts = [f"{model.limits.max_input_tokens} in"] if model.limits.max_input_tokens else []
    parts += [f"{model.limits.max_output_tokens} out"] if model.limits.max_output_tokens else []
    return ", ".join(parts)


def _parity(model: ModelInfo) -> str:
    if model.parity is None:
        return "none"
    return f"{model.parity.cases:,} cases, {model.parity.max_abs_logit_diff:.0e}"
