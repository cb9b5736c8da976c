"""Holds graphs in half precision against what the eager model loses in the same type.

exporter/certificate/half_comparison.py says what is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.package.graph_io import INPUT_IDS, LENGTHS, LOGITS, PIXEL_VALUES
from engine.package.manifest import (
    EncodingContract,
    GenerationContract,
    HalfPrecision,
    ImageContract,
    Precision,
)
from engine.session import create_session
from exporter.certificate.cases import BATCH_SIZES, Progress
from exporter.certificate.comparison import Comparison, Floats, exported_graphs
from exporter.certificate.driver import generate
from exporter.certificate.generation import affordable_cases
from exporter.certificate.generation_cases import Case
from exporter.certificate.half_comparison import Half, HalfComparison
from exporter.certificate.one_pass_cases import draw_images, random_groups
from exporter.certificate.sides import Sides, chunks_of, step_of
from exporter.graphs.target import DTYPES
from exporter.samples import SEED, Tokens


def certify_half_generation(
    model: nn.Module,
    contract: GenerationContract,
    directory: Path,
    samples: Sequence[Tokens],
    progress: Progress,
) -> HalfPrecision:
    """Compare what a decoder in float16 gives, prompt by prompt alone and in batches of eight.

    `model` is in float64. Raises CertificateError at the first fault.
    """
    half = Half(half_of(model, "fp16"), HalfComparison("fp16"))
    cases, _ = affordable_cases(model, contract, samples)
    sides = Sides(model, contract, directory, Comparison(), half=half)
    size = max(BATCH_SIZES)
    for first in range(0, len(cases), size):
        members = cases[first : first + size]
        alone = [sides.run_alone(case) for case in members]
        tokens = [_chosen(case, seen.top_ids) for case, seen in zip(members, alone, strict=True)]
        together = generate(sides.batch, members, sides.asked(), tokens)
        for i, (case, eager) in enumerate(zip(members, sides.eager(members, tokens), strict=True)):
            assert eager.rounded is not None, "it was asked for"
            beside = f"in a batch of {len(members)}"
            for seen, where in ((alone[i], "alone"), (together[i], beside)):
                how = f"{where} in float16, {chunks_of(sides.chunk)}"
                half.found.case(seen.all_logits, eager.exact, eager.rounded, step_of(case, how))
        progress(first + len(members), len(cases))
    return half.found.result()


def certify_half_texts(
    model: nn.Module, contract: EncodingContract, directory: Path
) -> HalfPrecision:
    """Compare what a one-pass text model in float16 gives, texts of one length together."""
    batches = []
    for group in random_groups(np.random.default_rng(SEED), contract):
        ids = torch.tensor(group)
        taken = {INPUT_IDS: ids, LENGTHS: torch.full((len(ids),), ids.shape[1])}
        batches.append((f"text of {ids.shape[1]} tokens", taken, ids))
    return _certify_batches(model, batches, directory)


def certify_half_images(
    model: nn.Module, contract: ImageContract, directory: Path
) -> HalfPrecision:
    """Compare what a vision model in float16 gives for images of noise."""
    pixels = torch.from_numpy(draw_images(contract))
    return _certify_batches(model, [("images", {PIXEL_VALUES: pixels}, pixels)], directory)


def _certify_batches(
    model: nn.Module, batches: Sequence[tuple[str, dict[str, Tensor], Tensor]], directory: Path
) -> HalfPrecision:
    """Compare batches: what they are, what the graph takes, and what the eager model takes."""
    found, half = HalfComparison("fp16"), half_of(model, "fp16")
    with exported_graphs():
        session = create_session(directory / "model.onnx")
    for what, taken, eager_input in batches:
        with exported_graphs():
            logits = session.run({name: value.numpy() for name, value in taken.items()})[LOGITS]
        exact, rounded = (_eager(m, eager_input) for m in (model, half))
        per_row = logits.size // (logits.shape[-1] * len(logits))
        ours, theirs, theirs_half = (
            array.reshape(-1, array.shape[-1]) for array in (logits, exact, rounded)
        )
        found.case(ours, theirs, theirs_half, _place(what, per_row))
    return found.result()


def half_of(model: nn.Module, precision: Precision) -> nn.Module:
    """Return a copy of a model in half precision."""
    return copy.deepcopy(model).eval().to(DTYPES[precision])


def _eager(model: nn.Module, given: Tensor) -> Floats:
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        output = model(given.to(dtype) if given.is_floating_point() else given)
    logits: Floats = output.logits.double().numpy()
    return logits


def _chosen(case: Case, top_ids: NDArray[np.int64]) -> Tokens:
    return tuple(top_ids[-case.num_tokens :, 0].tolist())


def _place(what: str, per_row: int) -> Callable[[int], str]:
    return lambda i: f"{what}, row {i // per_row}, position {i % per_row}"
