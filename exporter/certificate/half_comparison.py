"""Holds logits in half precision against what the eager model loses in the same type.

A bound on the difference alone says little: it depends on the model. What the type costs the eager
model, both held against float64, is the measure: the graphs may not lose much more, neither over
all cases, a case or a position, in the root mean square, nor in a single logit that hardly shows
there. Random models of 12 and 24 layers came to 0.5 to 0.9 of it.

Where the two differ most is a matter of chance: of a trained model a few positions are lost a
hundred times as much as most, and other ones by the graphs than by the eager model, though both
lose the same over all. So a case is held against the eager model's worst, and so is a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

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
# layers came to 0.007 and 0.07. Where it is more in the eager model, MAX_POSITION_RATIO times that.
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
    """What is kept of numbers [N, V] until all are there: a figure for each of N positions."""

    width: int  # V
    ours: Floats  # mean squares of the differences to the eager model in float64
    theirs: Floats  # of the eager model's in half precision
    largest: Floats  # of our differences
    largest_of_eager: float
    spread: Floats
    lead: Floats  # of the eager model's best entry
    best: NDArray[np.int64]  # [N, 2]: our best entry, and the eager model's
    place: Callable[[int], str]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.width * len(self.ours)


class _Worst(NamedTuple):
    """What the type costs the eager model where it costs most: in a case, a position, a logit."""

    case: float
    position: float
    logit: float


class HalfComparison:
    """What was found of all cases, which are judged in `result`.

    Every method raises CertificateError: at what is no number, or may be written and is not to be.
    """

    def __init__(self, precision: Precision = "fp16") -> None:
        self._type, self._max_share = _NAMES[precision], MAX_DIFF[precision]
        self._positions = self._decided = 0
        self._numbers = 0
        self._squares = self._eager_squares = self._spread = 0.0
        self._max_diff = self._max_case = self._max_position = 0.0
        self._cases: dict[str, list[_Case]] = {"logits": [], "values": []}

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
        self._take("logits", np.flatnonzero(written), exported, eager, ours, theirs, place)

    def values(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare embeddings [N, D] likewise; they count as no positions."""
        eager = eager.astype(np.float64)
        ours, theirs = np.abs(exported - eager), np.abs(eager_half - eager)
        self._refuse_no_number(ours, place)
        self._take("values", np.arange(eager.shape[1]), exported, eager, ours, theirs, place)

    def vectors(
        self, exported: Floats, eager: Floats, eager_half: Floats, place: Callable[[int], str]
    ) -> None:
        """Compare embeddings [N, D] of a model that has no logits: they are the positions."""
        self.values(exported, eager, eager_half, place)
        exact = eager.astype(np.float64)
        self._count(np.abs(exported - exact), np.abs(eager_half - exact), exact.std(axis=1))

    def result(self) -> HalfPrecision:
        """Judge all cases, and return what was found; CertificateError at the first fault."""
        for kind, cases in self._cases.items():
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

    def _take(
        self,
        kind: str,
        ids: NDArray[np.int64],
        exported: Floats,
        eager: Floats,
        ours: Floats,
        theirs: Floats,
        place: Callable[[int], str],
    ) -> None:
        """Keep a case, of the entries `ids`, until the eager model's worst is known."""
        case = _Case(
            width=eager.shape[1],
            ours=np.square(ours).mean(axis=1),
            theirs=np.square(theirs).mean(axis=1),
            largest=ours.max(axis=1),
            largest_of_eager=float(theirs.max()),
            spread=eager.std(axis=1),
            lead=_lead(eager),
            best=ids[np.stack([exported.argmax(axis=1), eager.argmax(axis=1)], axis=1)],
            place=place,
        )
        self._cases[kind].append(case)

    def _judge(self, kind: str, cases: Sequence[_Case]) -> None:
        """Hold cases against what the type costs the eager model, in all of them and at its worst.

        Of few numbers a case means nothing by itself.
        """
        spread = float(np.concatenate([case.spread for case in cases]).mean())
        of_type = max(_over_all(cases, "theirs"), _FLOOR * spread)
        alone = [case for case in cases if case.size >= _ENOUGH]
        worst = _Worst(
            max([of_type, *(_over_all([case], "theirs") for case in alone)]),
            max([of_type, *(float(np.sqrt(case.theirs.max())) for case in cases)]),
            max(case.largest_of_eager for case in cases),
        )
        of_all = _over_all(cases, "ours") / of_type
        for case in cases:
            of_case = _over_all([case], "ours") / worst.case if case.size >= _ENOUGH else 0.0
            self._check_ratios(case, max(of_all, of_case), worst)
            if kind == "logits":
                self._check_tokens(case, worst)
                self._check_largest(case, spread, worst)

    def _check_ratios(self, case: _Case, of_case: float, worst: _Worst) -> None:
        at = int(case.ours.argmax())
        of_position = float(np.sqrt(case.ours[at])) / worst.position
        self._max_case = max(self._max_case, of_case)
        self._max_position = max(self._max_position, of_position)
        if of_case > MAX_CASE_RATIO or of_position > MAX_POSITION_RATIO:
            raise CertificateError(
                f"{case.place(at)}: the exported model in {self._type} is {of_position:.3g} times "
                f"as far from float64 as the eager model in it is anywhere, {of_case:.3g} times "
                f"over the case or over all; allowed are {MAX_POSITION_RATIO:g} and "
                f"{MAX_CASE_RATIO:g}"
            )

    def _check_largest(self, case: _Case, spread: float, worst: _Worst) -> None:
        """Hold every difference to a share of the logits' `spread`, or to the eager model's."""
        at = int(case.largest.argmax())
        if case.largest[at] > max(self._max_share * spread, MAX_POSITION_RATIO * worst.logit):
            raise CertificateError(
                f"{case.place(at)}: a logit of the exported model in {self._type} is "
                f"{case.largest[at]:.3g} from float64, with a standard deviation of {spread:.3g}; "
                f"allowed are {self._max_share:g} of that, or {MAX_POSITION_RATIO:g} times the "
                f"largest difference of the eager model in it, {worst.logit:.3g}"
            )

    def _check_tokens(self, case: _Case, worst: _Worst) -> None:
        if case.width == 1:
            return
        decided = case.lead > DECIDED * max(worst.logit, worst.case)
        wrong = decided & (case.best[:, 0] != case.best[:, 1])
        if wrong.any():
            at = int(wrong.argmax())
            ours, theirs = case.best[at]
            raise CertificateError(
                f"{case.place(at)}: the exported model's best entry is {ours}, the eager model's "
                f"{theirs}, by more than {self._type} can turn"
            )
        self._decided += int(decided.sum())


def _lead(eager: Floats) -> Floats:
    """Return by how much the best entry of each row leads; nothing leads where it is the only."""
    best = np.partition(eager, -2, axis=1)[:, -2:] if eager.shape[1] > 1 else eager
    lead: Floats = best[:, -1] - best[:, 0]
    return lead


def _over_all(cases: Sequence[_Case], side: Literal["ours", "theirs"]) -> float:
    """Return the root mean square of the differences of one side."""
    squares = sum(case.width * float(getattr(case, side).sum()) for case in cases)
    return math.sqrt(squares / sum(case.size for case in cases))
