"""The certificate of a package: its graphs give what the eager model gives, or there is none."""

from __future__ import annotations

import copy
from pathlib import Path

from engine.package import Certificate
from exporter.cases import Progress, sample_prompts
from exporter.certify_generation import certify_generation
from exporter.certify_one_pass import certify_encoding, certify_images
from exporter.checkpoint import Checkpoint
from exporter.contracts import encoding_contract, generation_contract, image_contract


def certify(checkpoint: Checkpoint, directory: Path, progress: Progress) -> Certificate:
    """Compare the graphs in `directory` with the checkpoint's eager model.

    Raises CertificateError, saying where, at the first difference.
    """
    config = checkpoint.config.model
    # In float64, so that only the graphs' rounding counts: the eager model's own is as large. It
    # took the largest difference of a date model's 518 cases from 5.4e-5 to 3.3e-5.
    model = copy.deepcopy(checkpoint.model).eval().double()
    generation, image = generation_contract(config), image_contract(config)
    encoding = encoding_contract(config)

    def samples(limit: int) -> list[tuple[int, ...]]:
        return sample_prompts(checkpoint.config.task, checkpoint.tokenizer, limit)

    if generation:
        limit = (generation.cross_cache or generation.cache).max_len
        result = certify_generation(model, generation, directory, samples(limit), progress)
    elif encoding:
        result = certify_encoding(model, encoding, directory, samples(encoding.max_len), progress)
    else:
        assert image is not None, "a model generates, encodes text, or sees images"
        result = certify_images(model, image, directory, progress)
    comparison, cases, covered = result
    return Certificate(
        cases=cases,
        tokens_compared=comparison.tokens_compared,
        tokens_equal=comparison.tokens_compared,  # or the comparison had raised
        max_abs_logit_diff=comparison.max_abs_logit_diff,
        max_abs_logit=comparison.max_abs_logit,
        tolerance=comparison.tolerance,
        batch_invariant=True,  # likewise
        dtype="fp32",
        covered=covered,
    )
