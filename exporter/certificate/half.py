"""Holds graphs in half precision against what the eager model loses in the same type.

exporter/certificate/half_comparison.py says what is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.one_pass.item_encoder import EncodedItem
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import (
    EncodingContract,
    GenerationContract,
    HalfPrecision,
    ImageContract,
    Precision,
)
from exporter.certificate.cases import BATCH_SIZES, Progress
from exporter.certificate.comparison import Comparison, exported_graphs
from exporter.certificate.driver import generate, predict
from exporter.certificate.execution import OnCpu
from exporter.certificate.generation import affordable_cases
from exporter.certificate.half_comparison import Half, HalfComparison
from exporter.certificate.one_pass import flat, rounded_output
from exporter.certificate.one_pass_cases import (
    draw_images,
    eager_inputs,
    given_texts,
    image_items,
    random_groups,
    run_eager,
    text_items,
)
from exporter.certificate.sides import Sides, chunks_of, step_of
from exporter.certificate.subject import Subject
from exporter.graphs.target import DTYPES
from exporter.samples import SEED, Tokens


def certify_half_generation(
    subject: Subject, contract: GenerationContract, directory: Path, progress: Progress
) -> HalfPrecision:
    """Compare what a decoder in float16 gives, prompt by prompt alone and in batches of eight.

    Raises CertificateError at the first fault.
    """
    model, banned = subject.model, subject.banned
    half = Half(half_of(model, "fp16"), HalfComparison("fp16", banned))
    cases, _ = affordable_cases(model, contract, subject.samples, banned)
    sides = Sides(model, contract, directory, Comparison(banned=banned), half=half)
    size = max(BATCH_SIZES)
    for first in range(0, len(cases), size):
        members = cases[first : first + size]
        alone = [sides.run_alone(case) for case in members]
        tokens = [case.chosen(seen) for case, seen in zip(members, alone, strict=True)]
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
    model: nn.Module, contract: EncodingContract, directory: Path, samples: Sequence[Tokens]
) -> HalfPrecision:
    """Compare what a one-pass text model in float16 gives, random texts of one length together."""
    batches: list[_Batch] = []
    groups = random_groups(np.random.default_rng(SEED), contract)
    for group in groups + [[sample] for sample in given_texts(samples, contract)]:
        what = f"text of {len(group[0].ids)} tokens"
        batches.append(_Batch(what, text_items(group), eager_inputs(group)))
    return _certify_batches(model, batches, directory)


def certify_half_images(
    model: nn.Module, contract: ImageContract, directory: Path
) -> HalfPrecision:
    """Compare what a vision model in float16 gives for images of noise."""
    pixels = draw_images(contract)
    batch = _Batch("images", image_items(pixels), (torch.from_numpy(pixels),))
    return _certify_batches(model, [batch], directory)


class _Batch(NamedTuple):
    what: str
    items: list[EncodedItem]
    eager_inputs: tuple[Tensor | None, ...]


def _certify_batches(model: nn.Module, batches: Sequence[_Batch], directory: Path) -> HalfPrecision:
    """Compare the logits and the vectors of batches, what a model gives of them."""
    found, half = HalfComparison("fp16"), half_of(model, "fp16")
    with exported_graphs():
        graph = OnCpu().load_session(directory)
    for batch in batches:
        outputs, exact = predict(graph, batch.items), run_eager(model, batch.eager_inputs)
        rounded = rounded_output(half, batch.eager_inputs)
        for name, hold in ((LOGITS, found.case), (EMBEDDING, found.values)):
            if name in outputs:
                theirs = flat(getattr(exact, name).numpy())
                place = _place(f"{batch.what}, {name}", len(theirs) // len(batch.items))
                hold(flat(outputs[name]), theirs, rounded.to_hold(name), place)
    return found.result()


def half_of(model: nn.Module, precision: Precision) -> nn.Module:
    """Return a copy of a model in half precision."""
    return copy.deepcopy(model).eval().to(DTYPES[precision])


def _place(what: str, per_row: int) -> Callable[[int], str]:
    return lambda i: f"{what}, row {i // per_row}, position {i % per_row}"
