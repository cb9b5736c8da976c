"""Judges how far a graph is from float64 by how far the eager model itself is, in its own type.

The loss of a position is the largest difference of one of its numbers to the eager model's in
float64. The graph and the eager model both have one at the same positions, and by play their
quantiles are compared. The tails of two right models differ by chance, by what sums happen to
cancel; the medians do not, so they are held nearer. If a graph would be refused, the eager model
runs three times more, with other orders of its sums, and the most that it loses counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import CertificateError
from engine.package.manifest import (
    LEAST_POSITIONS,
    MOST_TIMES,
    Judged,
    Precision,
    Quantiles,
)
from engine.sampling.logits import StepLogits
from engine.sampling.top_k import step_logits
from exporter.prover.eager import (
    NEVER,
    NUM_ORDERS,
    Eager,
    Floats,
    Origin,
    View,
    far_below,
    losses,
)
from exporter.samples import Tokens

# How often a quantile of a class of positions may be the eager model's; of a play, MOST_TIMES.
# Right graphs come to 0.8 to 1.5 in the median and at the 90th percentile, and to 6 in the tail.
OF_CLASS: Mapping[str, float] = {"median": 2.5, "p90": 4.0}
FLOOR = 4  # units in the last place of the largest number of a play: less is no loss
DECIDED = 4.0  # a lead so many times the 99th percentile of the eager model's losses keeps a token

# Kinds of positions, in the order in which they are neighbours.
KINDS = (
    "inside a prompt",
    "beside the edge of a chunk",
    "at a prompt's end",
    "at the first step",
    "at later steps",
    "at the last place of a row",
    "at the first token",
    "between the first token and the last",
    "at the last token",
)

_LEAST_POSITIONS, _LEAST_CASES = 64, 8  # a class with fewer is joined with its neighbour
_HOPELESS = 20.0  # times the bound of a median: no order of sums makes up for it
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "largest": 1.0}
_NAMES = {
    "median": "median",
    "p90": "90th percentile",
    "p99": "99th percentile",
    "largest": "largest",
}
_OWN_LOGPROB = 1e-4  # from a log-probability to the graph's own logits, for every 16 of the largest
_FULL_SIZE = 16.0
_OF_NEVER = 1e-3  # share by which the number of a token that is never written may be another


def kinds_of_tokens(count: int) -> NDArray[np.int64]:
    """Return the kinds of the tokens of a text, all of which have numbers: [count]."""
    kinds = np.full(count, KINDS.index("between the first token and the last"))
    if count > 1:
        kinds[[0, -1]] = KINDS.index("at the first token"), KINDS.index("at the last token")
    return kinds


class At(NamedTuple):
    """The cases and places of N positions."""

    cases: NDArray[np.int64]  # [N], the number of each one's case in its play
    lengths: NDArray[np.int64]  # [N], tokens of the case's source, else of its prompt or text
    kinds: NDArray[np.int64]  # [N], places in KINDS
    place: Callable[[int], str]  # says where position i is

    def part(self, positions: NDArray[np.int64]) -> At:
        """Return some of the positions."""
        parts = (self.cases[positions], self.lengths[positions], self.kinds[positions])
        return At(*parts, lambda i: self.place(int(positions[i])))


class Judge(ABC):
    """The checks of every judge: bits that are claimed equal, and choices by the own logits."""

    needs_own: ClassVar[bool]  # whether the eager model is to run in its own type, too

    def __init__(self, *, banned: Tokens = (), needs_equal_bits: bool = True) -> None:
        """Count the likeliest tokens without the `banned` ones, as the engine writes them.

        Without `needs_equal_bits` a row in a batch may differ from itself alone; it is judged then.
        """
        self.banned = banned
        self.batch_invariant = True
        self.tokens_compared = self.tokens_equal = self.tokens_undecided = 0
        self.judged: list[Judged] = []  # by the eager model's losses
        self._needs_equal_bits = needs_equal_bits

    @abstractmethod
    def numbers(
        self, play: str, what: str, seen: Floats, eager: Eager, at: At, *, counts: bool = True
    ) -> None:
        """Take numbers [N, V] of a graph; positions that do not count are copies of others.

        Raises CertificateError for a NaN.
        """

    @abstractmethod
    def check(self) -> None:
        """Judge what was played; raise CertificateError for what is wrong."""

    def step(
        self, play: str, seen: StepLogits, eager: Eager, at: At, *, counts: bool = True
    ) -> None:
        """Take the logits of a step, and what tokens are chosen from.

        Raises CertificateError unless the likeliest tokens are those of the graph's own logits, to
        the bit, with their log-probabilities.
        """
        self.numbers(play, "logits", seen.all_logits, eager, at, counts=counts)
        _check_top(seen, at.place)

    def step_bits(
        self, batched: StepLogits, alone: StepLogits, place: Callable[[int], str]
    ) -> bool:
        """Compare all that a step gives in a batch with what it gives alone; return if it is equal.

        Alone as many of the likeliest tokens were asked for as in the batch, or more. Attention to
        the source is NaN unless the batch was asked for it.
        """
        k = batched.top_ids.shape[1]
        equal = self.bits(batched.all_logits, alone.all_logits, place)
        for name in ("top_ids", "top_logits", "top_logprobs"):
            of_name = _named(place, name)
            equal &= self.bits(getattr(batched, name), getattr(alone, name)[:, :k], of_name)
        if batched.alignment is not None and alone.alignment is not None:
            (asked,) = (~np.isnan(batched.alignment[:, 0])).nonzero()
            if len(asked):
                ours, solo = batched.alignment[asked], alone.alignment[asked]
                of_row = _named(lambda i: place(int(asked[i])), "alignment")
                equal &= self.bits(ours, solo, of_row)
        return equal

    def bits(
        self, batched: NDArray[np.generic], alone: NDArray[np.generic], place: Callable[[int], str]
    ) -> bool:
        """Compare rows [N, ...] computed in a batch with the same rows computed alone.

        Return whether they are equal; raise CertificateError where they have to be.
        """
        differs = (batched != alone).reshape(len(alone), -1).any(axis=1)
        if not differs.any():
            return True
        self.batch_invariant = False
        if self._needs_equal_bits:
            i = int(differs.argmax())
            with np.errstate(invalid="ignore"):
                diff = np.abs(batched[i].astype("f8") - alone[i]).max()
            raise CertificateError(
                f"{place(i)}: the row differs by {diff:.3g} from the same row computed alone; "
                "it must not depend on its neighbours, nor on what its memory held before"
            )
        return False

    def choosable(self, logits: Floats) -> Floats:
        """Return logits [N, V] by which no banned token is the likeliest."""
        return without(self.banned, logits)


class _Part(NamedTuple):
    """Positions [N] of a play that were taken at once."""

    at: At
    ours: Floats  # losses of the graph
    theirs: Floats  # the eager model's
    leads: Floats  # NaN: the position chooses no token
    turned: NDArray[np.bool_]
    largest: float  # number in float64
    view: View
    origin: Origin | None  # None: `theirs` has every order of sums
    num_runs: int = 1  # the eager model


class ExactJudge(Judge):
    """Judges formats that do not round further than their type; `check` raises at a fault."""

    needs_own = True

    def __init__(
        self, *, precision: Precision = "fp32", banned: Tokens = (), needs_equal_bits: bool = True
    ) -> None:
        super().__init__(banned=banned, needs_equal_bits=needs_equal_bits)
        self._precision = precision
        self._played: dict[tuple[str, str], list[_Part]] = {}

    def numbers(
        self, play: str, what: str, seen: Floats, eager: Eager, at: At, *, counts: bool = True
    ) -> None:
        """See Judge; a banned token may be so large that its rounding would hide all others."""
        view = self.choosable if what == "logits" else np.asarray
        ours, theirs = view(seen), view(eager.exact)
        self._take(play, what, ours, eager, at, view)
        if what == "logits" and self.banned:

            def of_banned(logits: Floats) -> Floats:
                return logits[:, self.banned]

            self._take(play, "logits of banned tokens", of_banned(seen), eager, at, of_banned)
        refuse_no_number(seen, at.place)
        _refuse_written(seen, eager.exact, at.place)
        if what != "logits" or not counts or seen.shape[1] == 1:
            return
        parts = self._played[play, what]
        turned = ours.argmax(-1) != theirs.argmax(-1)
        parts[-1] = parts[-1]._replace(leads=lead_of(theirs), turned=turned)

    def step(
        self, play: str, seen: StepLogits, eager: Eager, at: At, *, counts: bool = True
    ) -> None:
        """See Judge; log-probabilities are judged as logits are."""
        super().step(play, seen, eager, at, counts=counts)
        ids = seen.top_ids

        def of_top(logits: Floats) -> Floats:
            return np.take_along_axis(log_softmax(logits), ids, axis=1)

        self._take(play, "log-probabilities", seen.top_logprobs, eager, at, of_top)

    def _take(self, play: str, what: str, seen: Floats, eager: Eager, at: At, view: View) -> None:
        exact, theirs, size = view(eager.exact), eager.losses(view), len(seen)
        if not np.isfinite(theirs).all():
            place = at.place(int((~np.isfinite(theirs)).argmax()))
            raise CertificateError(
                f"{place}: PyTorch itself gives what is not a finite number; {self._other_type}"
                "look for NaN, and for huge numbers, among the weights of the checkpoint"
            )
        leads, turned = np.full(size, np.nan), np.zeros(size, np.bool_)
        largest = float(_sizes(exact).max(initial=0))
        part = _Part(at, losses(seen, exact), theirs, leads, turned, largest, view, eager.origin)
        self._played.setdefault((play, what), []).append(part)

    def check(self) -> None:
        """Judge what was played; raise CertificateError for the first play that is wrong.

        If bits may differ, on a device, the error tells of all plays. The eager model runs again
        if that may change the verdict.
        """
        self.judged, wrong = [], []
        self.tokens_compared = self.tokens_undecided = 0
        for (play, what), parts in self._played.items():
            of_plays = [played for (_, other), played in self._played.items() if other == what]
            largest = max(float(p.theirs.max(initial=0)) for played in of_plays for p in played)
            table = _Table(parts, self._precision, largest)
            refused = any(table.faults()) or any(table.turned_tokens())
            if refused and not table.is_hopeless:
                parts[:] = _with_all_orders(parts)
                table = _Table(parts, self._precision, largest)
            faults = islice(table.faults(), 1)
            wrong += [fault.words(play, what, self._other_type) for fault in faults]
            wrong += table.turned_tokens()
            choices, decided = int(np.isfinite(table.leads).sum()), int(table.decided.sum())
            self.tokens_compared += decided
            self.tokens_undecided += choices - decided
            self.judged.append(table.summary(play, what))
        self.tokens_equal = self.tokens_compared  # another one is refused
        if wrong:
            raise CertificateError(wrong[0] if self._needs_equal_bits else "\n".join(wrong))

    @property
    def _other_type(self) -> str:
        """The first thing to do, if a type has fewer numbers than float32."""
        return "" if self._precision == "fp32" else "export with --precision bf16 or fp32, and "


class _Fault(NamedTuple):
    """A quantile of some positions at which the graph loses too much."""

    of: str  # which positions
    name: str  # the quantile's
    ours: float
    theirs: float
    factor: float  # that is allowed
    worst: str  # place
    worst_ours: float
    worst_theirs: float

    def words(self, play: str, what: str, other: str) -> str:
        """Say what is wrong, where, and what to do."""
        ratio = self.ours / self.theirs if self.theirs else np.inf
        verb = "is" if what == "alignment" else "are"
        return (
            f"{self.worst}: {what} {verb} {self.worst_ours:.3g} from float64, PyTorch's own "
            f"{self.worst_theirs:.3g}; the {self.name} {self.of} ({play}) is {self.ours:.3g}, "
            f"{ratio:.3g} times PyTorch's own {self.theirs:.3g}, where {self.factor:g} times are "
            f"allowed: the graph computes something else than this checkpoint's model; {other}if "
            "it was exported from it, please report that with the model's configuration"
        )


class _Table:
    """The positions of a play, as columns of N."""

    def __init__(self, parts: Sequence[_Part], precision: Precision, largest: float) -> None:
        """The `largest` is what the eager model loses most in any play."""
        self.cases = np.concatenate([part.at.cases for part in parts])
        self.lengths = np.concatenate([part.at.lengths for part in parts])
        self.kinds = np.concatenate([part.at.kinds for part in parts])
        self.ours = np.concatenate([part.ours for part in parts])
        self.theirs = np.concatenate([part.theirs for part in parts])
        self.leads = np.concatenate([part.leads for part in parts])
        self.turned = np.concatenate([part.turned for part in parts])
        self.num_runs = max(part.num_runs for part in parts)
        self.floor = FLOOR * _unit(max(part.largest for part in parts), precision)
        self.largest = largest
        self._parts, self._starts = parts, np.cumsum([0, *(len(part.ours) for part in parts)])

    def place(self, i: int) -> str:
        """Say where a position is."""
        part = int(np.searchsorted(self._starts, i, side="right")) - 1
        return self._parts[part].at.place(i - int(self._starts[part]))

    @property
    def is_hopeless(self) -> bool:
        """Whether no order of sums can make up for what the graph loses."""
        allowed = max(self.floor, MOST_TIMES["median"] * float(np.median(self.theirs)))
        return bool(np.median(self.ours) > _HOPELESS * allowed)

    @property
    def decided(self) -> NDArray[np.bool_]:
        """Positions at which the eager model chooses a token by more than rounding turns."""
        found: NDArray[np.bool_] = self.leads > self._turnable
        return found

    @property
    def _turnable(self) -> Floats:
        """The largest lead at each position that rounding turns, where it cost most there."""
        usual = max(self.floor, _at(self.theirs, 0.99))
        found: Floats = DECIDED * np.maximum(usual, self.theirs)
        return found

    def turned_tokens(self) -> Iterator[str]:
        """Say where the graph chooses another token than a decided eager model, if it does."""
        wrong = self.decided & self.turned
        if wrong.any():
            i = int(wrong.argmax())
            yield (
                f"{self.place(i)}: the graph's likeliest token is another than that of the eager "
                f"model in float64, which leads by {self.leads[i]:.3g}; rounding turns no lead "
                f"above {self._turnable[i]:.3g}"
            )

    def faults(self) -> Iterator[_Fault]:
        """Yield every quantile that is too large: of all positions, then of classes."""
        yield from self._faults(np.arange(len(self.ours)), "of all positions", MOST_TIMES)
        for length, members in self._classes(self.lengths):
            yield from self._faults(members, f"at length {length}", OF_CLASS)
        for kind, members in self._classes(self.kinds):
            yield from self._faults(members, KINDS[kind], OF_CLASS)

    def _faults(
        self, members: NDArray[np.int64], of: str, factors: Mapping[str, float]
    ) -> Iterator[_Fault]:
        ours, theirs = self.ours[members], self.theirs[members]
        for quantile, factor in factors.items():
            if len(members) < LEAST_POSITIONS[quantile]:
                continue
            one, other = (_at(side, _QUANTILES[quantile]) for side in (ours, theirs))
            if quantile == "largest":  # by chance, few positions have none of those that are hard
                other = max(other, self.largest)
            if not one <= max(factor * other, self.floor):
                worst = members[int(ours.argmax())]
                place = self.place(worst), float(self.ours[worst]), float(self.theirs[worst])
                yield _Fault(of, _NAMES[quantile], one, other, factor, *place)

    def _classes(self, keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the first key and the members of each class; small ones are joined."""
        found: list[tuple[int, NDArray[np.int64]]] = []
        for key in np.unique(keys):
            members = np.flatnonzero(keys == key)
            if found and not self._is_class(found[-1][1]):
                key, before = found.pop()
                members = np.concatenate([before, members])
            found.append((int(key), members))
        if len(found) > 1 and not self._is_class(found[-1][1]):
            _, last = found.pop()
            key, before = found.pop()
            found.append((key, np.concatenate([before, last])))
        if len(found) > 1:  # else it is the whole play
            yield from found

    def _is_class(self, members: NDArray[np.int64]) -> bool:
        few = len(members) < _LEAST_POSITIONS
        return not few and len(np.unique(self.cases[members])) >= _LEAST_CASES

    def summary(self, play: str, what: str) -> Judged:
        """Return what a certificate keeps of it."""
        return Judged(
            play=play,
            what=what,
            positions=len(self.ours),
            exported=_quantiles(self.ours),
            eager=_quantiles(self.theirs),
            runs=self.num_runs,
            floor=self.floor,
        )


def _with_all_orders(parts: Sequence[_Part]) -> list[_Part]:
    """Return them with the most that the eager model loses in any order of its sums."""
    found = [part._replace(num_runs=1 + NUM_ORDERS, origin=None) for part in parts]
    for again in dict.fromkeys(part.origin.again for part in parts if part.origin):
        cases = again()
        for i, part in enumerate(parts):
            if part.origin and part.origin.again is again:
                eager = cases[part.origin.case].part(part.origin.positions)
                theirs = np.maximum(part.theirs, eager.losses(part.view))
                found[i] = found[i]._replace(theirs=theirs)
    return found


def without(banned: Tokens, logits: Floats) -> Floats:
    """Return logits [N, V] by which no banned token is the likeliest."""
    if not banned:
        return logits
    logits = logits.copy()
    logits[:, banned] = np.finfo(np.float32).min  # finite, so that two sides do not differ in it
    return logits


def refuse_no_number(exported: NDArray[np.generic], place: Callable[[int], str]) -> None:
    """Raise CertificateError for rows [N, ...] with what is no finite number."""
    bad = ~np.isfinite(exported).all(axis=-1)
    if bad.any():
        raise CertificateError(
            f"{place(int(bad.argmax()))}: the exported model gives what is not a finite number; "
            "export with --precision fp32, and --weights fp32"
        )


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities [N, V] in the type of the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _check_top(exported: StepLogits, place: Callable[[int], str]) -> None:
    """Refuse likeliest tokens that are not those of the same row's logits, the lower id first."""
    logits, ids = exported.all_logits, exported.top_ids
    expected = step_logits(logits, ids.shape[1])
    for name in ("top_ids", "top_logits"):
        found, wanted = getattr(exported, name), getattr(expected, name)
        if (found != wanted).any():
            i, rank = np.argwhere(found != wanted)[0]
            raise CertificateError(
                f"{place(int(i))}: {name} {rank + 1} of {found.shape[1]} is {found[i, rank]}, by "
                f"the graph's own logits it is {wanted[i, rank]}"
            )
    own = np.take_along_axis(log_softmax(logits.astype(np.float64)), ids, axis=1)
    allowed = _OWN_LOGPROB * np.maximum(_sizes(logits).max(axis=-1) / _FULL_SIZE, 1)
    bad = ~((np.abs(exported.top_logprobs - own) < allowed[:, None]) | far_below(own))
    if bad.any():
        i, rank = np.argwhere(bad)[0]
        raise CertificateError(
            f"{place(int(i))}: top_logprobs {rank + 1} of {bad.shape[1]} is "
            f"{exported.top_logprobs[i, rank]:.6g}, by the graph's own logits it is "
            f"{own[i, rank]:.6g}"
        )


def _refuse_written(exported: Floats, exact: Floats, place: Callable[[int], str]) -> None:
    """Refuse numbers [N, V] by which a token that is never written may be."""
    never = far_below(exact)
    if not never.any():
        return
    differs = np.abs(exported - exact) > _OF_NEVER * np.abs(exact)
    if (bad := (never & differs & (exported > NEVER)).any(axis=-1)).any():
        raise CertificateError(
            f"{place(int(bad.argmax()))}: a token that is never written may be written"
        )


def lead_of(logits: Floats) -> Floats:
    """Return by how much the best entry of each row [N, V] is ahead of the second."""
    second_and_best = np.partition(logits, -2, axis=-1)[:, -2:]
    lead: Floats = second_and_best[:, 1] - second_and_best[:, 0]
    return lead


def _sizes(numbers: Floats) -> Floats:
    """Return the absolute values, 0 for tokens that are never written."""
    is_size = np.isfinite(numbers) & ~far_below(numbers) & (numbers > NEVER)
    sizes: Floats = np.where(is_size, np.abs(numbers), 0)
    return sizes


def _unit(largest: float, precision: Precision) -> float:
    """Return a unit in the last place of a number in a type."""
    if precision == "fp16":
        return float(np.spacing(np.float16(largest)))
    return float(np.spacing(np.float32(largest))) * (2**16 if precision == "bf16" else 1)


def _at(values: Floats, quantile: float) -> float:
    return float(np.quantile(values, quantile))


def _quantiles(values: Floats) -> Quantiles:
    found = np.quantile(values, list(_QUANTILES.values())).tolist()
    return Quantiles.model_validate(dict(zip(_QUANTILES, found, strict=True)))


def _named(place: Callable[[int], str], name: str) -> Callable[[int], str]:
    return lambda i: f"{place(i)}, {name}"
