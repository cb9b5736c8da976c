"""Tables on the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from tokenweir import ModelInfo, ParityAnswers, TextQuality

    from engine.package.manifest import (
        Answers,
        Certificate,
        Comparison,
        DeviceCertificate,
        Judged,
        Loss,
        Manifest,
    )

_PIPE_WIDTH = 120
_MOST_IDS = 8  # shown of a default


def print_table(table: Table) -> None:
    """Print a table to the standard output, as wide as the terminal, or COLUMNS, allows."""
    for column in table.columns:
        column.overflow = "fold"  # no value is cut
    Console(width=table_width()).print(table)


def table_width() -> int | None:
    """Return the width to print in; None: rich finds it."""
    # Into a pipe or a file there is no width to keep to.
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH


def certificate_table(manifest: Manifest, certificate: Certificate) -> Table:
    """Return the certificate of a package, one fact a row."""
    c = certificate
    table = Table(title=f"Certificate of {manifest.name} {manifest.version}", show_header=False)
    table.add_row("model", f"{manifest.architecture}, {manifest.task}")
    cache = f", KV cache {manifest.generation.cache.dtype}" if manifest.generation else ""
    numbers = f"{manifest.precision}, weights {manifest.weights}{cache}"
    table.add_row("target", f"{manifest.target}, {numbers}")
    table.add_row("cases compared with PyTorch", f"{c.cases:,}, proof {c.proof}")
    if c.original:
        table.add_row("original", c.original)
    halves, answers = _judged(c.half, " in float16"), answers_of(c.answers)
    for name, value in (*_compared(c, c.answers is None), *halves, *answers):
        table.add_row(name, value)
    if c.largest_float16 is not None:
        table.add_row("largest number in float16", _near(c.largest_float16))
    if c.loss is not None:
        for name, value in _loss(c.loss):
            table.add_row(name, value)
    table.add_row("rows bit-equal alone and in a batch", "yes" if c.batch_invariant else "no")
    for name, covered in c.covered.items():
        table.add_row(name.replace("_", " "), _covered(name, covered))
    if manifest.defaults.given:
        table.add_row("defaults", told_defaults(manifest.defaults.given))
    table.add_row("made with", _toolchain(manifest.toolchain))
    if c.device is not None:
        for name, value in _on_device(c.device):
            table.add_row(f"on the GPU: {name}", value)
    return table


def device_table(manifest: Manifest, certificate: DeviceCertificate) -> Table:
    """Return what was shown of a package on a device, one fact a row."""
    table = Table(title=f"{manifest.name} {manifest.version} on a GPU", show_header=False)
    for name, value in _on_device(certificate):
        table.add_row(name, value)
    return table


def _on_device(found: DeviceCertificate) -> Iterator[tuple[str, str]]:
    yield "GPU", escape(f"{found.gpu}, driver {found.driver}, onnxruntime {found.onnxruntime}")
    if found.buckets:
        yield "rows of a decode call", ", ".join(map(str, found.buckets))
    yield "cases compared with PyTorch", f"{found.cases:,}"
    yield from _compared(found, generates=bool(found.buckets))
    if found.loss is not None:
        yield "largest logit difference", f"{found.loss.max_abs_logit_diff:.2e}"
    yield "rows bit-equal alone and in a batch", "yes" if found.batch_invariant else "no"
    yield "SHA-256 of outputs", found.digest


def _toolchain(toolchain: Mapping[str, str]) -> str:
    """Return versions of libraries, threads, L2 size and instruction sets, as a text."""
    return escape(", ".join(f"{name} {value}" for name, value in sorted(toolchain.items())))


def _compared(found: Comparison, generates: bool) -> Iterator[tuple[str, str]]:
    """Yield what a comparison came to: tokens or labels, and what both sides lose."""
    if found.tokens_compared:
        yield _same(generates), f"{found.tokens_equal:,} of {found.tokens_compared:,}"
    yield from _judged(found.judged)


def _same(generates: bool) -> str:
    """Return the name of the choices that both sides make alike, as the web page has it."""
    return "same next token" if generates else "same label, unless rounding decides"


def _near(largest: float) -> str:
    """Return how near a number comes to the largest of float16, in words."""
    share = f"{largest:,.0f}" if largest >= 10 else f"{largest:.2g}"
    return f"{share} of 65,504: larger inputs may pass it" if largest > 32_752 else share


def _judged(judged: Sequence[Judged], where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the differences to float64 of what was judged, beside those of PyTorch itself."""
    for one in judged:
        ours, theirs = one.exported, one.eager
        yield (
            f"{one.what} from float64, {one.play}{where}",
            f"median {ours.median:.1e}, largest {ours.largest:.1e}; "
            f"PyTorch itself {theirs.median:.1e}, {theirs.largest:.1e}",
        )


def answers_of(answers: Answers | ParityAnswers | None) -> Iterator[tuple[str, str]]:
    """Yield, by name, how far what items are told is from what PyTorch tells."""
    if answers is None:
        return
    if answers.labels:
        yield "labels that differ", f"{answers.labels_turned:,} of {answers.labels:,}"
    if answers.max_probability_diff is not None:
        yield "largest difference of a probability", f"{answers.max_probability_diff:.1e}"
    if answers.max_score_diff is not None:
        yield "largest difference of a score", f"{answers.max_score_diff:.1e}"
        if answers.pairs:
            yield "pairs in another order", f"{answers.pairs_turned:,} of {answers.pairs:,}"
    if answers.max_vector_loss is not None and answers.max_number_diff is not None:
        yield "largest 1 - cosine of a vector", f"{answers.max_vector_loss:.1e}"
        yield "largest difference of a number", f"{answers.max_number_diff:.1e}"
        yield "nearest neighbours kept", f"{answers.neighbours_kept:,} of {answers.items:,}"


def _loss(loss: Loss) -> Iterator[tuple[str, str]]:
    if loss.logit_std:
        yield (
            "logit difference",
            f"mean {loss.mean_abs_logit_diff:.2e}, largest {loss.max_abs_logit_diff:.2e} "
            f"(std {loss.logit_std:.2e}; allowed {loss.max_logit_loss * loss.logit_std:.0e})",
        )
        yield "tokens or labels that may differ", f"{loss.max_token_loss:.0%}"
    if loss.max_abs_alignment_diff is not None:
        yield "largest alignment difference", f"{loss.max_abs_alignment_diff:.2e}"
    if loss.perplexity is not None and loss.eager_perplexity is not None:
        rise = loss.perplexity / loss.eager_perplexity - 1
        yield (
            "perplexity",
            f"{loss.perplexity:.4g}, of the eager model {loss.eager_perplexity:.4g}: "
            f"{rise:+.2%} on {loss.text_tokens:,} tokens (allowed {loss.max_perplexity_loss:+.0%})",
        )
    if loss.text_lines:
        yield f"chrF of answers to {loss.text_lines:,} lines", _chrf(loss)


def _chrf(told: Loss | TextQuality) -> str:
    """Return how near answers are to references, and to those of the eager model."""
    parts = []
    if told.chrf is not None and told.eager_chrf is not None:
        parts.append(f"{told.chrf:.1f}, of the eager model's {told.eager_chrf:.1f}")
    if told.chrf_between is not None:
        parts.append(f"to the eager model's {told.chrf_between:.1f}")
    return "; ".join(parts) or "none: nothing was written"


def _covered(name: str, covered: list[int] | int) -> str:
    if isinstance(covered, int):
        return f"{covered:,}"
    if name == "prefill_chunks":
        return ", ".join(str(size or "whole prompt") for size in covered)
    if len(covered) > 12:
        return f"{len(covered)} values, {min(covered)} to {max(covered)}"
    return ", ".join(map(str, covered))


def model_table(model: ModelInfo) -> Table:
    """Return what a server says of one of its models, one fact a row."""
    table = Table(title=f"{model.model} {model.model_version}", title_justify="left")
    table.show_header = False
    table.add_row("state", f"{model.state}: {model.message}" if model.message else model.state)
    if (traffic := model.traffic) is not None:  # only admin ports tell it
        table.add_row("traffic", f"{traffic.share:g} % of the calls, workers: {traffic.replicas}")
    table.add_row("architecture", model.architecture)
    if model.device:
        table.add_row("runs on", f"{model.device}, in {model.precision}")
    limits = model.limits
    counts = {"tokens in": limits.max_input_tokens, "out": limits.max_output_tokens}
    table.add_row("limits", ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    table.add_row("parity", _parity(model))
    if model.parity is not None and (quality := model.parity.text_quality):
        table.add_row("chrF of answers", f"{_chrf(quality)}, on {quality.lines:,} lines")
    if model.parity is not None and model.parity.toolchain:
        table.add_row("made with", _toolchain(model.parity.toolchain))
    table.add_row("capabilities", ", ".join(model.capabilities))
    if model.defaults:
        table.add_row("defaults", told_defaults(model.defaults))
    if model.labels:
        table.add_row("labels", ", ".join(model.labels))
    table.add_row("manifest", model.manifest_sha256)
    return table


def told_defaults(defaults: Mapping[str, object]) -> str:
    """Return what a package gives to requests that leave options away, by name."""
    told = (f"{name} {_default(value)}" for name, value in sorted(defaults.items()))
    return escape(", ".join(told))


def _default(value: object) -> str:
    """Return a default as a person reads it, the first of many ids."""
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, tuple):
        return str(value)
    shown = " ".join(_default(one) for one in value[:_MOST_IDS])
    return f"[{shown}, {len(value)} in all]" if len(value) > _MOST_IDS else f"[{shown}]"


def _parity(model: ModelInfo) -> str:
    """Return in a few words how near a model is to PyTorch, by what it gives."""
    parity = model.parity
    if parity is None:
        return "none"
    parts = [f"{parity.cases:,} cases, proof {parity.proof}"]
    if parity.tokens_compared:
        same = f"{parity.tokens_equal:,} of {parity.tokens_compared:,}"
        parts.append(f"{_same(parity.answers is None)} {same}")
    parts += [f"{name} {value}" for name, value in answers_of(parity.answers)]
    alone = [one for one in parity.losses if one.what == "logits"][:1]
    parts += [
        f"logits within {one.largest:.0e} of float64, PyTorch itself {one.eager_largest:.0e}"
        for one in alone
    ]
    if parity.largest_float16 is not None:
        parts.append(f"largest number in float16 {_near(parity.largest_float16)}")
    if parity.answers is None and not alone:
        parts.append(f"largest logit difference {parity.max_abs_logit_diff:.0e}")
    if parity.original:
        parts.append(parity.original)
    return ", ".join(parts)
