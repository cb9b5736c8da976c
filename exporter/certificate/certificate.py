"""The certificate of a package: its graphs give what the eager model gives, or there is none.

A format that rounds weights or cache gives something else; its certificate says how much, and there
is none if that is more than the limits allow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.package.graph_io import DRAW_GRAPHS
from engine.package.manifest import Certificate, HalfPrecision, Loss, PackageFormat
from exporter.certificate.cases import Covered, Progress
from exporter.certificate.comparison import Comparison, LossyComparison, exported_graphs
from exporter.certificate.execution import Execution, OnCpu
from exporter.certificate.generation import certify_generation
from exporter.certificate.half import (
    certify_half_generation,
    certify_half_images,
    certify_half_texts,
)
from exporter.certificate.half_comparison import Half
from exporter.certificate.loss import SHARE_LOSS, LossLimits, check_loss
from exporter.certificate.one_pass import Pair, certify_encoding, certify_images
from exporter.certificate.perplexity import measure_perplexity
from exporter.certificate.scored_text import ScoredText
from exporter.certificate.sides import Sides
from exporter.certificate.subject import Subject, subject_of
from exporter.certificate.twin import twin_graphs
from exporter.certificate.unrounded import certify_unrounded
from exporter.checkpoint import Checkpoint
from exporter.graphs.contracts import contract_of
from exporter.graphs.target import target_of

_PLAIN = PackageFormat()
_ON_CPU = OnCpu()


def certify(
    checkpoint: Checkpoint,
    directory: Path,
    progress: Progress,
    *,
    form: PackageFormat = _PLAIN,
    limits: LossLimits | None = None,
    text: ScoredText | None = None,
    bans: bool = True,
) -> Certificate:
    """Compare the graphs in `directory` with the checkpoint's eager model.

    With `limits` differences are counted, and compared with them in the end; perplexity and chrF
    are measured on `text`; before it rounds, such a format must be equal too. Graphs for CUDA are
    run on the CPU here: those of the same bodies in float32 must be equal to the eager model, those
    in float16 as near as it is itself in that type. Without `bans` tokens that the package bans
    count as all others do, which is how packages were certified before.
    Raises CertificateError: without limits, saying where, at the first difference.
    """
    if form.is_lossy:
        certify_unrounded(checkpoint, form)
    subject = subject_of(checkpoint, form, bans=bans)
    with _runnable(checkpoint, directory, form) as (runnable, in_it):
        shown = replace(subject, contract=contract_of(checkpoint.config.model, in_it))
        found = _certify(shown, runnable, in_it, progress, limits, text)
    half = _certify_half(subject, directory, progress) if form.has_half_stage else None
    invariant = found.batch_invariant and target_of(form).runs_here  # on a device it is shown there
    return found.model_copy(update={"half": half, "batch_invariant": invariant, "dtype": str(form)})


@contextmanager
def _runnable(
    checkpoint: Checkpoint, directory: Path, form: PackageFormat
) -> Iterator[tuple[Path, PackageFormat]]:
    """Give graphs that a CPU computes in float32, and their format: those in `directory`, or twins.

    A twin is of the same bodies, and rounds the same weights. What rounds in float16 runs as it is.
    """
    if form.precision == "fp32" or (form.precision == "fp16" and form.is_lossy):
        yield directory, form
        return
    weights = "fp32" if form.weights == form.precision else form.weights
    kv_cache = "fp32" if form.kv_cache == form.precision else form.kv_cache
    twin = PackageFormat(form.target, "fp32", weights, kv_cache)
    with twin_graphs(checkpoint, form, twin) as twins:
        for name in DRAW_GRAPHS:  # they are no twin's, and the package's own are proven
            (twins / name).unlink(missing_ok=True)
            if (directory / name).exists():
                shutil.copy(directory / name, twins)
        yield twins, twin


def _certify(
    subject: Subject,
    directory: Path,
    in_it: PackageFormat,
    progress: Progress,
    limits: LossLimits | None,
    text: ScoredText | None,
) -> Certificate:
    if limits:
        return _certify_loss(subject, directory, in_it, progress, limits, text)
    comparison = Comparison(needs_equal_bits=target_of(in_it).runs_here, banned=subject.banned)
    cases, covered = compare_all(subject, directory, comparison, progress)
    return _result(comparison, cases, covered, in_it)


def _certify_loss(
    subject: Subject,
    directory: Path,
    in_it: PackageFormat,
    progress: Progress,
    limits: LossLimits,
    text: ScoredText | None,
) -> Certificate:
    comparison, generation = LossyComparison(banned=subject.banned), subject.contract.generation
    cases, covered = compare_all(subject, directory, comparison, progress)
    perplexity = answers = None
    if generation and text and text.pieces:
        perplexity = measure_perplexity(subject.model, generation, directory, text.pieces)
    if generation and text and text.lines:
        from exporter.certificate.answers import measure_answers  # loads sacrebleu

        answers = measure_answers(subject.model, generation, directory, text.lines, text.tokenizer)
    loss = check_loss(comparison, perplexity, limits, answers)
    return _result(comparison, cases, covered, in_it, loss)


def _result(
    comparison: Comparison,
    cases: int,
    covered: Covered,
    in_it: PackageFormat,
    loss: Loss | None = None,
) -> Certificate:
    tolerance, of_alignment = comparison.tolerance, comparison.alignment_tolerance
    if loss is not None:
        tolerance = loss.max_logit_loss * (loss.logit_std or 1)
        if comparison.max_abs_alignment_diff is not None:
            of_alignment = SHARE_LOSS * loss.max_logit_loss
    return Certificate(
        cases=cases,
        tokens_compared=comparison.tokens_compared,
        tokens_equal=comparison.tokens_equal,
        max_abs_logit_diff=comparison.max_abs_logit_diff,
        max_abs_logit=comparison.max_abs_logit,
        max_abs_vector_diff=None if comparison.tokens_seen else comparison.max_abs_vector_diff,
        max_abs_alignment_diff=comparison.max_abs_alignment_diff,
        alignment_tolerance=of_alignment,
        tolerance=tolerance,
        batch_invariant=comparison.batch_invariant,
        dtype=str(in_it),
        loss=loss,
        covered=covered,
    )


def _certify_half(subject: Subject, directory: Path, progress: Progress) -> HalfPrecision:
    model, contract = subject.model, subject.contract
    if contract.generation:
        return certify_half_generation(subject, contract.generation, directory, progress)
    if contract.encoding:
        return certify_half_texts(model, contract.encoding, directory, subject.samples)
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return certify_half_images(model, contract.image, directory)


def compare_all(
    subject: Subject,
    directory: Path,
    comparison: Comparison,
    progress: Progress,
    execution: Execution = _ON_CPU,
    half: Half | None = None,
) -> tuple[int, Covered]:
    """Compare all cases of a model; return their number and what they covered.

    With `half` logits are held to its bound besides.
    """
    model, contract = subject.model, subject.contract
    if contract.generation:
        sides = Sides(
            model, contract.generation, directory, comparison, execution=execution, half=half
        )
        return certify_generation(sides, subject.samples, progress)
    with exported_graphs():
        pair = Pair(model, execution.load_session(directory), half)
    if contract.encoding:
        return certify_encoding(pair, contract.encoding, subject.samples, comparison, progress)
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return certify_images(pair, contract.image, comparison, progress)
