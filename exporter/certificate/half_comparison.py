"""Holds logits in half precision against what the eager model loses in the same type.

A bound on the difference alone says little: it depends on the model. What the type costs the eager
model, both held against float64, is the measure: the graphs may not lose much more, neither over a
case or a position, in the root mean square, nor in a single logit that hardly shows there. Random
models of 12 and 24 layers came to 0.5 to 0.9 of it. A position is held against what the type costs
the eager model there or over the case, whichever is more. Of a few numbers both differences are a
matter of chance: all cases of less than a thousand are judged as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from engine.errors import CertificateError
from engine.package.manifest import (
    MAX_CASE_RATIO,
    MAX_POSITION_RATIO,
    HalfPrecision,
    Precision,
)
from exporter.certificate.comparison import NEVER, Floats

# Of a standard deviation of the logits, the difference of a single one; random models of 12 and 24
# layers came to 0.007 and 0.07. Where it is more in the eager model, MAX_CASE_RATIO times that.
MAX_DIFF: dict[Precision, float] = {"fp16": 0.02, "bf16": 0.2}
DECIDED = 4.0  # a lead so many times the eager model's largest difference keeps the token
_ENOUGH = 1000  # numbers, for the ratio of a case to mean something by itself
_FLOOR = 1e-3  # of a standard deviation: below, a ratio of two roundings says nothing
_NAMES: dict[Precision, str] = {"fp16": "float16", "bf16": "bfloat16"}


class Half(NamedTuple):
    """The eager model in half precision, and what was found of graphs in the same type."""

    model: nn.Module
    found: HalfComparison


class _Case(NamedTuple):
    """Numbers [N, V] and differences to the eager model's in float64; `ids` of what is in V."""

    ids: NDArray[np.int64]
    exported: Floats
    eager: Floats
    ours: Floats
    theirs: Floats  # the eager model's in half precision
    place: Callable[[int], str]


class HalfComparison:
    """What was found of all cases; every method raises CertificateError at the first fault.

    Small cases are judged all together, in `result`.
    """

    def __init__(self, precision: Precision = "fp16") -> None:
        self._type, self._max_share = _NAMES[precision], MAX_DIFF[precision]
        self._positions = self._decided = 0
        self._numbers = 0
        self._squares = self._eager_squares = self._spread = 0.0
        self._max_diff = self._max_case = self._max_position = 0.0
        self._small: dict[str, list[_Case]] = {"logits": [], "values": []}

    def case(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare the logits [N, V] of one case with the eager model's in float64 and rounded.

        Tokens that an import keeps from being written, by a bias, are to have no more of a chance.
        """
        written = (eager > NEVER).all(axis=0)
        if (exported[:, ~written] > NEVER).any():
            bad = int((exported[:, ~written] > NEVER).any(axis=1).argmax())
            raise CertificateError(f"{place(bad)}: a token that is never written may be written")
        exported, eager, eager_half = (a[:, written] for a in (exported, eager, eager_half))
        eager = eager.astype(np.float64)
        ours, theirs = np.abs(exported - eager), np.abs(eager_half - eager)
        self._refuse_no_number(ours, place)
        self._count(ours, theirs, eager.std(axis=1))
        self._take("logits", _Case(np.flatnonzero(written), exported, eager, ours, theirs, place))

    def values(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare embeddings [N, D] likewise; they count as no positions."""
        eager = eager.astype(np.float64)
        ours, theirs = np.abs(exported - eager), np.abs(eager_half - eager)
        self._refuse_no_number(ours, place)
        ids = np.arange(eager.shape[1])
        self._take("values", _Case(ids, exported, eager, ours, theirs, place))

    def vectors(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare embeddings [N, D] of a model that has no logits: they are the positions."""
        self.values(exported, eager, eager_half, place)
        exact = eager.astype(np.float64)
        self._count(np.abs(exported - exact), np.abs(eager_half - exact), exact.std(axis=1))

    def result(self) -> HalfPrecision:
        """Judge the small cases, and return what was found."""
        for kind, cases in self._small.items():
            if cases:
                self._judge(kind, cases)
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

    def _refuse_no_number(self, ours: Floats, place: Callable[[int], str]) -> None:
        if not np.isfinite(ours).all():
            bad = int((~np.isfinite(ours)).any(axis=1).argmax())
            raise CertificateError(
                f"{place(bad)}: the exported model gives what is not a finite number in "
                f"{self._type}; export with --precision fp32, or bf16"
            )

    def _count(self, ours: Floats, theirs: Floats, spread: Floats) -> None:
        self._positions += len(ours)
        self._numbers += ours.size
        self._squares += float(np.square(ours).sum())
        self._eager_squares += float(np.square(theirs).sum())
        self._spread += float(spread.sum())
        self._max_diff = max(self._max_diff, float(ours.max()))

    def _take(self, kind: str, case: _Case) -> None:
        if case.ours.size < _ENOUGH:
            self._small[kind].append(case)
        else:
            self._judge(kind, [case])

    def _judge(self, kind: str, cases: Sequence[_Case]) -> None:
        """Hold cases against what the type costs the eager model in all of them."""
        spread = float(np.concatenate([case.eager.std(axis=1) for case in cases]).mean())
        allowed = max(_over_all([case.theirs for case in cases]), _FLOOR * spread)
        of_eager = max(float(case.theirs.max()) for case in cases)
        of_all = _over_all([case.ours for case in cases]) / allowed
        self._max_case = max(self._max_case, of_all)
        for case in cases:
            self._check_ratios(case, of_all, allowed)
            if kind == "logits":
                self._check_tokens(case, allowed)
                self._check_largest(case, spread, of_eager)

    def _check_ratios(self, case: _Case, of_all: float, allowed: float) -> None:
        # By chance a position of few logits may be nearly exact on one side.
        of_positions = _rms(case.ours) / np.maximum(_rms(case.theirs), allowed)
        self._max_position = max(self._max_position, float(of_positions.max()))
        worst = int(of_positions.argmax())
        if of_all > MAX_CASE_RATIO or of_positions[worst] > MAX_POSITION_RATIO:
            raise CertificateError(
                f"{case.place(worst)}: the exported model in {self._type} is "
                f"{of_positions[worst]:.3g} times as far from float64 as the eager model in it, "
                f"{of_all:.3g} times over the case; allowed are {MAX_POSITION_RATIO:g} and "
                f"{MAX_CASE_RATIO:g}"
            )

    def _check_largest(self, case: _Case, spread: float, of_eager: float) -> None:
        """Hold every difference to a share of the logits' `spread`, or to the eager model's."""
        largest = case.ours.max(axis=1)
        worst = int(largest.argmax())
        if largest[worst] > max(self._max_share * spread, MAX_CASE_RATIO * of_eager):
            raise CertificateError(
                f"{case.place(worst)}: a logit of the exported model in {self._type} is "
                f"{largest[worst]:.3g} from float64, with a standard deviation of {spread:.3g}; "
                f"allowed are {self._max_share:g} of that, or {MAX_CASE_RATIO:g} times the largest "
                f"difference of the eager model in it, {of_eager:.3g}"
            )

    def _check_tokens(self, case: _Case, allowed: float) -> None:
        exported, eager = case.exported, case.eager
        if eager.shape[1] == 1:
            return
        best = np.partition(eager, -2, axis=1)[:, -2:]
        turned_by = DECIDED * np.maximum(case.theirs.max(axis=1), allowed)
        decided = best[:, 1] - best[:, 0] > turned_by
        wrong = decided & (exported.argmax(axis=1) != eager.argmax(axis=1))
        if wrong.any():
            i = int(wrong.argmax())
            ours, theirs = (case.ids[logits[i].argmax()] for logits in (exported, eager))
            raise CertificateError(
                f"{case.place(i)}: the exported model's best entry is {ours}, the eager model's "
                f"{theirs}, by more than {self._type} can turn"
            )
        self._decided += int(decided.sum())


def _over_all(differences: Sequence[Floats]) -> float:
    squares = sum(float(np.square(a).sum()) for a in differences)
    return float(np.sqrt(squares / sum(a.size for a in differences)))


def _rms(differences: Floats) -> Floats:
    found: Floats = np.sqrt(np.square(differences).mean(axis=1))
    return found
