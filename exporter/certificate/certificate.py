"""The certificate of a package: its graphs give what the eager model gives, or there is none.

A format that rounds weights or cache gives something else; its certificate says how much, and there
is none if that is more than the limits allow.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from engine.package.manifest import Certificate, GenerationContract, HalfPrecision, PackageFormat
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
from exporter.checkpoint import Checkpoint
from exporter.graphs.contracts import encoding_contract, generation_contract, image_contract
from exporter.graphs.package_graphs import build_package_graphs, write_graphs
from exporter.graphs.target import target_of
from exporter.samples import encode_samples

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
) -> Certificate:
    """Compare the graphs in `directory` with the checkpoint's eager model.

    With `limits` differences are counted, and compared with them in the end; perplexity is measured
    on `text`. Graphs for CUDA are run on the CPU here: those of the same bodies in float32 must be
    equal to the eager model, those in float16 as near as it is itself in that type. Raises
    CertificateError: without limits, saying where, at the first difference.
    """
    # In float64, so that only the graphs' rounding counts: the eager model's own is as large. It
    # took the largest difference of a date model's 518 cases from 5.4e-5 to 3.3e-5.
    model = copy.deepcopy(checkpoint.model).eval().double()
    with _runnable(checkpoint, directory, form) as (runnable, in_it):
        found = _certify(checkpoint, model, runnable, in_it, progress, limits, text)
    half = None
    if form.has_half_stage:
        half = _certify_half(checkpoint, model, directory, form, progress)
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
    with tempfile.TemporaryDirectory(prefix="tokenweir-twin-") as name:
        same = target_of(form).functions[form.precision]
        write_graphs(build_package_graphs(checkpoint, twin, same), Path(name))
        yield Path(name), twin


def _certify(
    checkpoint: Checkpoint,
    model: nn.Module,
    directory: Path,
    in_it: PackageFormat,
    progress: Progress,
    limits: LossLimits | None,
    text: ScoredText | None,
) -> Certificate:
    generation = generation_contract(checkpoint.config.model, in_it)
    needs_equal_bits = target_of(in_it).runs_here
    comparison = LossyComparison() if limits else Comparison(needs_equal_bits=needs_equal_bits)
    cases, covered = compare_all(checkpoint, model, generation, directory, comparison, progress)
    loss, tolerance = None, comparison.tolerance
    alignment_tolerance = comparison.alignment_tolerance
    if isinstance(comparison, LossyComparison) and limits:
        perplexity = None
        if generation and text:
            perplexity = measure_perplexity(model, generation, directory, text)
        loss = check_loss(comparison, perplexity, limits)
        tolerance = limits.max_logit_loss * (comparison.logit_std or 1)
        if comparison.max_abs_alignment_diff is not None:
            alignment_tolerance = SHARE_LOSS * limits.max_logit_loss
    return Certificate(
        cases=cases,
        tokens_compared=comparison.tokens_compared,
        tokens_equal=comparison.tokens_equal,
        max_abs_logit_diff=comparison.max_abs_logit_diff,
        max_abs_logit=comparison.max_abs_logit,
        max_abs_alignment_diff=comparison.max_abs_alignment_diff,
        alignment_tolerance=alignment_tolerance,
        tolerance=tolerance,
        batch_invariant=comparison.batch_invariant,
        dtype=str(in_it),
        loss=loss,
        covered=covered,
    )


def _certify_half(
    checkpoint: Checkpoint,
    model: nn.Module,
    directory: Path,
    form: PackageFormat,
    progress: Progress,
) -> HalfPrecision:
    config = checkpoint.config.model
    generation = generation_contract(config, form)
    if generation:
        limit = (generation.cross_cache or generation.cache).max_len
        samples = encode_samples(checkpoint.samples, checkpoint.tokenizer, limit)
        return certify_half_generation(model, generation, directory, samples, progress)
    encoding, image = encoding_contract(config), image_contract(config)
    if encoding:
        return certify_half_texts(model, encoding, directory)
    assert image is not None, "a model generates, encodes text, or sees images"
    return certify_half_images(model, image, directory)


def compare_all(
    checkpoint: Checkpoint,
    model: nn.Module,
    generation: GenerationContract | None,
    directory: Path,
    comparison: Comparison,
    progress: Progress,
    execution: Execution = _ON_CPU,
    half: Half | None = None,
) -> tuple[int, Covered]:
    """Compare all cases of a model; return their number and what they covered.

    With `half` logits are held to its bound besides; `model` is in float64 then.
    """
    config = checkpoint.config.model
    encoding, image = encoding_contract(config), image_contract(config)

    def samples(limit: int) -> list[tuple[int, ...]]:
        return encode_samples(checkpoint.samples, checkpoint.tokenizer, limit)

    if generation:
        limit = (generation.cross_cache or generation.cache).max_len
        sides = Sides(model, generation, directory, comparison, execution=execution, half=half)
        return certify_generation(sides, samples(limit), progress)
    with exported_graphs():
        pair = Pair(model, execution.load_session(directory), half)
    if encoding:
        given = samples(encoding.max_len)
        return certify_encoding(pair, encoding, given, comparison, progress)
    assert image is not None, "a model generates, encodes text, or sees images"
    return certify_images(pair, image, comparison, progress)
