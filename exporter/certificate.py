"""The certificate of a package: its graphs give what the eager model gives, or there is none.

A format that rounds weights or cache gives something else; its certificate says how much, and there
is none if that is more than the limits allow.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from engine.errors import CertificateError
from engine.package import CacheDtype, Certificate, GenerationContract, Weights
from exporter.cases import Covered, Progress, sample_prompts
from exporter.certify_generation import certify_generation
from exporter.certify_one_pass import certify_encoding, certify_images
from exporter.checkpoint import Checkpoint
from exporter.comparison import Comparison, LossyComparison
from exporter.contracts import encoding_contract, generation_contract, image_contract
from exporter.loss import SHARE_LOSS, LossLimits, check_loss
from exporter.perplexity import Perplexity, measure_perplexity


def certify(
    checkpoint: Checkpoint,
    directory: Path,
    progress: Progress,
    *,
    weights: Weights = "fp32",
    kv_cache: CacheDtype = "fp32",
    limits: LossLimits | None = None,
    text: Path | None = None,
) -> Certificate:
    """Compare the graphs in `directory` with the checkpoint's eager model.

    With `limits` differences are counted, and compared with them in the end; perplexity is measured
    on `text`. Raises CertificateError: without limits, saying where, at the first difference.
    """
    generation = generation_contract(checkpoint.config.model, kv_cache)
    # In float64, so that only the graphs' rounding counts: the eager model's own is as large. It
    # took the largest difference of a date model's 518 cases from 5.4e-5 to 3.3e-5.
    model = copy.deepcopy(checkpoint.model).eval().double()
    comparison = LossyComparison() if limits else Comparison()
    cases, covered = _compare(checkpoint, model, generation, directory, comparison, progress)
    loss, tolerance = None, comparison.tolerance
    alignment_tolerance = comparison.alignment_tolerance
    if isinstance(comparison, LossyComparison) and limits:
        perplexity = _perplexity(checkpoint, model, generation, directory, text)
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
        dtype=weights if kv_cache == "fp32" else f"{weights}, {kv_cache} KV cache",
        loss=loss,
        covered=covered,
    )


def _compare(
    checkpoint: Checkpoint,
    model: nn.Module,
    generation: GenerationContract | None,
    directory: Path,
    comparison: Comparison,
    progress: Progress,
) -> tuple[int, Covered]:
    config = checkpoint.config.model
    encoding, image = encoding_contract(config), image_contract(config)

    def samples(limit: int) -> list[tuple[int, ...]]:
        return sample_prompts(checkpoint.config.task, checkpoint.tokenizer, limit)

    if generation:
        limit = (generation.cross_cache or generation.cache).max_len
        given = samples(limit)
        return certify_generation(model, generation, directory, given, comparison, progress)
    if encoding:
        given = samples(encoding.max_len)
        return certify_encoding(model, encoding, directory, given, comparison, progress)
    assert image is not None, "a model generates, encodes text, or sees images"
    return certify_images(model, image, directory, comparison, progress)


def _perplexity(
    checkpoint: Checkpoint,
    model: nn.Module,
    generation: GenerationContract | None,
    directory: Path,
    text: Path | None,
) -> Perplexity | None:
    if text is None:
        return None
    if generation is None or checkpoint.tokenizer is None:
        raise CertificateError(
            f"{text}: only a model that generates has a perplexity; leave out --text"
        )
    return measure_perplexity(model, generation, directory, checkpoint.tokenizer, text)
