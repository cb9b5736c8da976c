"""Holds logits in half precision against what the eager model loses in the same type.

A bound on the difference alone says little: it depends on the model. What the type costs the eager
model, both held against float64, is the measure: the graphs may not lose much more, neither over
all cases, a case or a position, in the root mean square, nor in a single logit that hardly shows
there. Random models of 12 and 24 layers came to 0.5 to 0.9 of it.

What a single case or position loses depends on which roundings meet, which is chance: of a trained
model a few positions lose a hundred times as much as most, others in the graphs than in one run of
the eager model. Where the graphs lose more than they may, the eager model runs again with random
roundings, and the most that it loses counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from exporter.certificate.random_rounding import Rounded
from exporter.samples import Tokens

# Of a standard deviation of the logits, the difference of a single one; random models of 12 and 24
# layers came to 0.007 and 0.07. Where it is more in the eager model, MAX_POSITION_RATIO times that.
MAX_DIFF: dict[Precision, float] = {"fp16": 0.02, "bf16": 0.2}
DECIDED = 4.0  # a lead so many times the eager model's largest difference keeps the token
MAX_ROUNDINGS = 15  # at random; of 1,036 cases of a trained model 378 needed some, and none above 4
_ENOUGH = 1000  # numbers, for the ratio of a case to mean something by itself
_FLOOR = 1e-4  # of a standard deviation: logits in float16 are rounded by more in any model
_NAMES: dict[Precision, str] = {"fp16": "float16", "bf16": "bfloat16"}


class Half(NamedTuple):
    """The eager model in half precision, and what was found of graphs in the same type."""

    model: nn.Module
    found: HalfComparison


class _Lost(NamedTuple):
    """Differences of numbers [N, V] to the eager model's in float64, a figure for each of N."""

    squares: Floats  # mean
    largest: Floats


@dataclass
class _Case:
    """Numbers [N, V], and what was lost of them on both sides."""

    ids: NDArray[np.int64]  # of what is in V
    exported: Floats
    eager: Floats
    again: Callable[[int], Floats]  # the eager model rounded at random
    place: Callable[[int], str]
    ours: _Lost
    theirs: list[_Lost] = field(default_factory=list)  # by rounding

    def lose(self, rounded: Floats) -> None:
        """Add what one rounding costs the eager model; one that ends in no numbers adds nothing."""
        is_finite = np.isfinite(rounded).all()
        self.theirs.append(_lost(rounded, self.eager) if is_finite else self.theirs[0])

    @property
    def spread(self) -> Floats:
        """The standard deviation of each position's numbers; of a single one, its size."""
        one = self.eager.shape[1] == 1
        found: Floats = np.abs(self.eager[:, 0]) if one else self.eager.std(axis=1)
        return found

    @property
    def most(self) -> _Lost:
        """The most that a rounding costs the eager model, for each position."""
        squares, largest = (np.max(of_all, axis=0) for of_all in zip(*self.theirs, strict=True))
        return _Lost(squares, largest)


@dataclass
class _Sums:
    """What all cases of one kind come to."""

    positions: int = 0
    numbers: int = 0
    ours: float = 0.0  # squares of differences
    theirs: float = 0.0  # of the eager model in half precision, rounded to the nearest
    spread: float = 0.0  # standard deviations
    largest: float = 0.0

    def add(self, case: _Case) -> None:
        """Count a case in, with what the first rounding costs."""
        positions, width = case.eager.shape
        self.positions += positions
        self.numbers += positions * width
        self.ours += width * float(case.ours.squares.sum())
        self.theirs += width * float(case.theirs[0].squares.sum())
        self.spread += float(case.spread.sum())
        self.largest = max(self.largest, float(case.ours.largest.max()))

    @property
    def rms(self) -> tuple[float, float]:
        """Of the differences, in the root mean square: ours, and the eager model's."""
        return math.sqrt(self.ours / self.numbers), math.sqrt(self.theirs / self.numbers)


class _Held(NamedTuple):
    """What was found of cases that are held."""

    case: float  # ratio
    position: float  # the largest ratio of one
    decided: int  # tokens


class HalfComparison:
    """What was found of all cases; every method raises CertificateError at the first fault.

    Small cases are judged all together, in `result`.
    """

    def __init__(self, precision: Precision = "fp16", banned: Tokens = ()) -> None:
        """Count the likeliest tokens without the `banned` ones."""
        self._banned = banned
        self._type, self._max_share = _NAMES[precision], MAX_DIFF[precision]
        self._max_case = self._max_position = 0.0
        self._decided = 0
        self._sums: dict[str, _Sums] = {}
        self._small: dict[str, list[_Case]] = {}

    def case(
        self, exported: Floats, eager: Floats, rounded: Rounded, place: Callable[[int], str]
    ) -> None:
        """Compare the logits [N, V] of one case with the eager model's in float64 and rounded.

        Tokens that an import keeps from being written, by a bias, are to have no more of a chance.
        """
        written = (eager > NEVER).all(axis=0)
        ids, never = np.flatnonzero(written), exported[:, ~written]
        exported, eager = exported[:, ids], eager[:, ids].astype(np.float64)
        self._take("logits", ids, exported, eager, rounded.of(ids), place)
        may_be = ~(never <= NEVER)  # what is no number may, too
        if may_be.any():
            bad = int(may_be.any(axis=1).argmax())
            raise CertificateError(f"{place(bad)}: a token that is never written may be written")

    def values(
        self, exported: Floats, eager: Floats, rounded: Rounded, place: Callable[[int], str]
    ) -> None:
        """Compare embeddings [N, D] likewise; beside logits they count as no positions."""
        ids = np.arange(eager.shape[1])
        self._take("values", ids, exported, eager.astype(np.float64), rounded, place)

    def result(self) -> HalfPrecision:
        """Judge the small cases and all together, and return what was found."""
        for kind, cases in self._small.items():
            self._judge(kind, cases)
        for sums in self._sums.values():
            self._check_all(sums)
        sums = self._sums.get("logits") or self._sums["values"]
        ours, theirs = sums.rms
        return HalfPrecision(
            positions=sums.positions,
            tokens_decided=self._decided,
            tokens_equal=self._decided,
            max_abs_logit_diff=sums.largest,
            logit_std=sums.spread / sums.positions,
            rms_diff=ours,
            eager_rms_diff=theirs,
            max_case_ratio=self._max_case,
            max_position_ratio=self._max_position,
        )

    def _take(
        self,
        kind: str,
        ids: NDArray[np.int64],
        exported: Floats,
        eager: Floats,
        rounded: Rounded,
        place: Callable[[int], str],
    ) -> None:
        for side, numbers in (("exported", exported), ("eager", rounded.nearest)):
            if not np.isfinite(numbers).all():
                bad = int((~np.isfinite(numbers)).any(axis=1).argmax())
                raise CertificateError(
                    f"{place(bad)}: the {side} model gives what is not a finite number in "
                    f"{self._type}; export with --precision fp32, or bf16"
                )
        case = _Case(ids, exported, eager, rounded.at_random, place, _lost(exported, eager))
        case.lose(rounded.nearest)
        self._sums.setdefault(kind, _Sums()).add(case)
        if eager.size < _ENOUGH:
            self._small.setdefault(kind, []).append(case)
        else:
            self._judge(kind, [case])

    def _judge(self, kind: str, cases: Sequence[_Case]) -> None:
        """Hold cases, as one, against the most that as many roundings as are needed cost."""
        for seed in range(MAX_ROUNDINGS):
            try:
                return self._keep(self._hold(kind, cases))
            except CertificateError:
                for case in cases:
                    case.lose(case.again(seed))
        return self._keep(self._hold(kind, cases))

    def _keep(self, held: _Held) -> None:
        self._max_case = max(self._max_case, held.case)
        self._max_position = max(self._max_position, held.position)
        self._decided += held.decided

    def _hold(self, kind: str, cases: Sequence[_Case]) -> _Held:
        """Hold cases against the roundings that there are."""
        floor = _FLOOR * float(np.concatenate([case.spread for case in cases]).mean())
        roundings = zip(*(case.theirs for case in cases), strict=True)
        of_type = max(floor, *(_over_all(cases, losses) for losses in roundings))
        of_all = _over_all(cases, [case.ours for case in cases]) / of_type
        position = max(self._check_ratios(case, of_all, floor) for case in cases)
        if kind != "logits":
            return _Held(of_all, position, 0)
        decided = sum(self._check_tokens(case, floor) for case in cases)
        for case in cases:
            self._check_largest(case, floor / _FLOOR)
        return _Held(of_all, position, decided)

    def _check_ratios(self, case: _Case, of_all: float, floor: float) -> float:
        of_positions = np.sqrt(case.ours.squares) / np.maximum(np.sqrt(case.most.squares), floor)
        worst = int(of_positions.argmax())
        if of_all > MAX_CASE_RATIO or of_positions[worst] > MAX_POSITION_RATIO:
            raise CertificateError(
                f"{case.place(worst)}: the exported model in {self._type} is "
                f"{of_positions[worst]:.3g} times as far from float64 as the eager model in it, "
                f"{of_all:.3g} times over the case; allowed are {MAX_POSITION_RATIO:g} and "
                f"{MAX_CASE_RATIO:g}"
            )
        return float(of_positions[worst])

    def _check_largest(self, case: _Case, spread: float) -> None:
        """Hold every difference to a share of the logits' `spread`, or to the eager model's."""
        allowed = np.maximum(self._max_share * spread, MAX_POSITION_RATIO * case.most.largest)
        worst = int((case.ours.largest / allowed).argmax())
        if case.ours.largest[worst] > allowed[worst]:
            raise CertificateError(
                f"{case.place(worst)}: a logit of the exported model in {self._type} is "
                f"{case.ours.largest[worst]:.3g} from float64, with a standard deviation of "
                f"{spread:.3g}; allowed are {self._max_share:g} of that, or {MAX_POSITION_RATIO:g} "
                "times the largest difference of the eager model in it there, "
                f"{case.most.largest[worst]:.3g}"
            )

    def _check_tokens(self, case: _Case, floor: float) -> int:
        """Return how many tokens the type cannot turn; they, and those of all, must be equal."""
        decided = self._check_best(case, case.ids, floor)
        if self._banned:
            decided = self._check_best(case, np.setdiff1d(case.ids, self._banned), floor)
        return decided

    def _check_best(self, case: _Case, ids: NDArray[np.int64], floor: float) -> int:
        if len(ids) < 2:
            return 0
        columns = np.searchsorted(case.ids, ids)
        exported, eager = case.exported[:, columns], case.eager[:, columns]
        best = np.partition(eager, -2, axis=1)[:, -2:]
        decided = best[:, 1] - best[:, 0] > DECIDED * np.maximum(case.most.largest, floor)
        wrong = decided & (exported.argmax(axis=1) != eager.argmax(axis=1))
        if wrong.any():
            i = int(wrong.argmax())
            ours, theirs = (ids[side[i].argmax()] for side in (exported, eager))
            raise CertificateError(
                f"{case.place(i)}: the exported model's best entry is {ours}, the eager model's "
                f"{theirs}, by more than {self._type} can turn"
            )
        return int(decided.sum())

    def _check_all(self, sums: _Sums) -> None:
        """Hold all cases together: what chance adds to one it takes from another."""
        ours, theirs = sums.rms
        of_all = ours / max(theirs, _FLOOR * sums.spread / sums.positions)
        if of_all > MAX_CASE_RATIO:
            raise CertificateError(
                f"the exported model in {self._type} is {of_all:.3g} times as far from float64 as "
                f"the eager model in it over all cases; allowed are {MAX_CASE_RATIO:g}"
            )
        self._max_case = max(self._max_case, of_all)


def _lost(numbers: Floats, exact: Floats) -> _Lost:
    differences = np.abs(numbers - exact)
    return _Lost(np.square(differences).mean(axis=1), differences.max(axis=1))


def _over_all(cases: Sequence[_Case], losses: Sequence[_Lost]) -> float:
    """Return the root mean square of all differences; a loss of each case."""
    parts = zip(cases, losses, strict=True)
    squares = sum(case.eager.shape[1] * float(lost.squares.sum()) for case, lost in parts)
    return math.sqrt(squares / sum(case.eager.size for case in cases))
