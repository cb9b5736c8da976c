"""Holds graphs in half precision against what the eager model loses in the same type.

A bound on the difference alone says little: it depends on the model. What the type costs the eager
model, both held against float64, is the measure: the graphs may not lose much more. Random models
of 12 and 24 layers came to 0.5 to 0.9 of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.errors import CertificateError
from engine.package import EncodingContract, GenerationContract, HalfPrecision, ImageContract
from engine.session import create_session
from exporter.cases import BATCH_SIZES, SEED, Progress, Tokens
from exporter.certify_generation import affordable_cases
from exporter.certify_one_pass import draw_images, random_groups
from exporter.comparison import Comparison, Floats, exported_graphs
from exporter.eager import eager_logits
from exporter.generation_cases import Case
from exporter.replay import generate
from exporter.sides import Sides, chunks_of, step_of

MAX_CASE_RATIO = 1.5  # of the root mean square of a case's differences to the eager model's
MAX_POSITION_RATIO = 3.0  # of a position's
DECIDED = 4.0  # a lead so many times the eager model's largest difference keeps the token
_FLOOR = 1e-3  # of a standard deviation: below, a ratio of two roundings says nothing


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
    found, half = HalfComparison(), _half_of(model)
    cases, _ = affordable_cases(model, contract, samples)
    sides = Sides(model, contract, directory, Comparison())
    size = max(BATCH_SIZES)
    for first in range(0, len(cases), size):
        members = cases[first : first + size]
        alone = [sides.run_alone(case) for case in members]
        tokens = [_chosen(case, seen.top_ids) for case, seen in zip(members, alone, strict=True)]
        sides.batch.cache.lengths[:] = sides.batch.cache.source_lengths[:] = 0
        with exported_graphs():
            together = generate(sides.batch, members, sides.asked(), tokens)
        exact = sides.eager(members, tokens)
        rounded = eager_logits(half, members, tokens)
        for i, case in enumerate(members):
            beside = f"in a batch of {len(members)}"
            for seen, where in ((alone[i], "alone"), (together[i], beside)):
                how = f"{where} in float16, {chunks_of(sides.chunk)}"
                found.case(seen.logits, exact[i], rounded[i], step_of(case, how))
        progress(first + len(members), len(cases))
    return found.result()


def certify_half_texts(
    model: nn.Module, contract: EncodingContract, directory: Path
) -> HalfPrecision:
    """Compare what a one-pass text model in float16 gives, texts of one length together."""
    batches = []
    for group in random_groups(np.random.default_rng(SEED), contract):
        ids = torch.tensor(group)
        taken = {"input_ids": ids, "lengths": torch.full((len(ids),), ids.shape[1])}
        batches.append((f"text of {ids.shape[1]} tokens", taken, ids))
    return _certify_batches(model, batches, directory)


def certify_half_images(
    model: nn.Module, contract: ImageContract, directory: Path
) -> HalfPrecision:
    """Compare what a vision model in float16 gives for images of noise."""
    pixels = torch.from_numpy(draw_images(contract))
    return _certify_batches(model, [("images", {"pixel_values": pixels}, pixels)], directory)


def _certify_batches(
    model: nn.Module, batches: Sequence[tuple[str, dict[str, Tensor], Tensor]], directory: Path
) -> HalfPrecision:
    """Compare batches: what they are, what the graph takes, and what the eager model takes."""
    found, half = HalfComparison(), _half_of(model)
    with exported_graphs():
        session = create_session(directory / "model.onnx")
    for what, taken, eager_input in batches:
        with exported_graphs():
            logits = session.run({name: value.numpy() for name, value in taken.items()})["logits"]
        exact, rounded = (_eager(m, eager_input) for m in (model, half))
        per_row = logits.size // (logits.shape[-1] * len(logits))
        ours, theirs, theirs_half = (
            array.reshape(-1, array.shape[-1]) for array in (logits, exact, rounded)
        )
        found.case(ours, theirs, theirs_half, _place(what, per_row))
    return found.result()


def _half_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().half()


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


class HalfComparison:
    """What was found of all cases; every method raises CertificateError at the first fault."""

    def __init__(self) -> None:
        self._positions = self._decided = 0
        self._numbers = 0
        self._squares = self._eager_squares = self._spread = 0.0
        self._max_diff = self._max_case = self._max_position = 0.0

    def case(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare the logits [N, V] of one case with the eager model's in float64 and float16."""
        eager = eager.astype(np.float64)
        ours, theirs = np.abs(exported - eager), np.abs(eager_half - eager)
        if not np.isfinite(ours).all():
            bad = int((~np.isfinite(ours)).any(axis=1).argmax())
            raise CertificateError(
                f"{place(bad)}: the exported model gives what is no finite number in float16; "
                "export with --precision bf16 or fp32"
            )
        spread = eager.std(axis=1)
        self._count(ours, theirs, spread)
        self._check_ratios(ours, theirs, spread, place)
        self._check_tokens(exported, eager, theirs, place)

    def result(self) -> HalfPrecision:
        """Return what was found."""
        return HalfPrecision(
            positions=self._positions,
            tokens_decided=self._decided,
            tokens_equal=self._decided,
            max_abs_logit_diff=self._max_diff,
            logit_std=self._spread / self._positions,
            rms_diff=float(np.sqrt(self._squares / self._numbers)),
            eager_rms_diff=float(np.sqrt(self._eager_squares / self._numbers)),
            max_case_ratio=self._max_case,
            max_position_ratio=self._max_position,
        )

    def _count(self, ours: Floats, theirs: Floats, spread: Floats) -> None:
        self._positions += len(ours)
        self._numbers += ours.size
        self._squares += float(np.square(ours).sum())
        self._eager_squares += float(np.square(theirs).sum())
        self._spread += float(spread.sum())
        self._max_diff = max(self._max_diff, float(ours.max()))

    def _check_ratios(
        self, ours: Floats, theirs: Floats, spread: Floats, place: Callable[[int], str]
    ) -> None:
        of_case = float(_rms(ours.reshape(1, -1))[0])
        allowed_of = max(float(_rms(theirs.reshape(1, -1))[0]), _FLOOR * float(spread.mean()))
        # By chance a position of few logits may be nearly exact on one side.
        of_positions = _rms(ours) / np.maximum(_rms(theirs), allowed_of)
        self._max_case = max(self._max_case, of_case / allowed_of)
        self._max_position = max(self._max_position, float(of_positions.max()))
        worst = int(of_positions.argmax())
        if of_case > MAX_CASE_RATIO * allowed_of or of_positions[worst] > MAX_POSITION_RATIO:
            raise CertificateError(
                f"{place(worst)}: the exported model in float16 is {of_positions[worst]:.3g} times "
                f"as far from float64 as the eager model in float16, {of_case / allowed_of:.3g} "
                f"times over the case; allowed are {MAX_POSITION_RATIO:g} and {MAX_CASE_RATIO:g}"
            )

    def _check_tokens(
        self, exported: Floats, eager: Floats, theirs: Floats, place: Callable[[int], str]
    ) -> None:
        if eager.shape[1] == 1:
            return
        best = np.partition(eager, -2, axis=1)[:, -2:]
        decided = best[:, 1] - best[:, 0] > DECIDED * theirs.max(axis=1)
        wrong = decided & (exported.argmax(axis=1) != eager.argmax(axis=1))
        if wrong.any():
            i = int(wrong.argmax())
            raise CertificateError(
                f"{place(i)}: the exported model's best entry is {exported[i].argmax()}, the eager "
                f"model's {eager[i].argmax()}, by more than float16 can turn"
            )
        self._decided += int(decided.sum())


def _rms(differences: Floats) -> Floats:
    found: Floats = np.sqrt(np.square(differences).mean(axis=1))
    return found
