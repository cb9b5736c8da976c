"""Holds what the exported graphs give against what the eager model gives, and stops at a fault.

Logits, values of embeddings and attention to the source may differ by 0.0001. Where the largest
logit of a position is above 16, the tolerance grows with it: float32 keeps 24 bits of a number, so
the rounding of a logit of -100, as GPT-2 has them, is eight times that of one of 12. The
certificate gives the largest tolerance that was used, and the largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import CertificateError, DeviceError
from engine.package.manifest import FULL_SIZE, LOGIT_TOLERANCE
from engine.sampling.logits import StepLogits
from engine.sampling.top_k import step_logits
from exporter.samples import Tokens

Floats = NDArray[np.float32]

TOLERANCE = LOGIT_TOLERANCE  # of a value of an embedding too; it grows above FULL_SIZE
NEVER = -1e20  # logits below are of tokens that older imports keep from being written, by a bias

# Where the eager model's two best tokens are nearer than this, it has not decided: the order in
# which a processor sums decides. Such a position is held to the tolerance, not to the token. It
# grows as the tolerance does.
UNDECIDED = 1e-5
_SHORTEST = 1e-6  # the length of an embedding that a loss is a share of
_LEAST = float(np.finfo(np.float32).min)  # finite, so that two sides do not differ in it


@contextmanager
def exported_graphs() -> Iterator[None]:
    """Turn whatever goes wrong in loading or running an exported graph into CertificateError.

    But for a device that has no room or fails, which is no fault of the graph.
    """
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's own have no other class in common
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CertificateError(f"the exported graph cannot be run: {reason}") from error


def without(banned: Tokens, logits: Floats) -> Floats:
    """Return logits [N, V] by which no banned token is the likeliest."""
    if not banned:
        return logits
    logits = logits.copy()
    logits[:, banned] = _LEAST
    return logits


class Comparison:
    """Counts what was compared; every method raises CertificateError at the first difference."""

    _counts: ClassVar[tuple[str, ...]] = ("tokens_compared", "tokens_equal", "tokens_undecided")

    def __init__(self, *, needs_equal_bits: bool = True, banned: Tokens = ()) -> None:
        """Count the likeliest tokens without the `banned` ones, as the engine writes them.

        Without `needs_equal_bits` a row in a batch is as near to itself alone as the tolerance.
        Graphs for another device are compared so: which bits they give there is shown there.
        """
        self._needs_equal_bits = needs_equal_bits
        self.banned = banned
        self.tokens_compared = 0
        self.tokens_equal = 0
        self.tokens_undecided = 0
        self.max_abs_logit_diff = 0.0
        self.max_abs_logit = 0.0
        self.max_abs_vector_diff: float | None = None  # None: there was none to compare
        self.max_abs_alignment_diff: float | None = None  # None: there was none to compare
        self.alignment_tolerance: float | None = None  # None: it was held to none
        self.tolerance = TOLERANCE  # the largest that was used
        self.batch_invariant = True

    @property
    def tokens_seen(self) -> int:
        """Positions with logits, whether the eager model decides there or not."""
        return self.tokens_compared + self.tokens_undecided

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Within, rows are compared as everywhere, but do not count: they are copies of others."""
        counted = {name: getattr(self, name) for name in self._counts}
        yield
        vars(self).update(counted)

    def logits(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare logits [N, V]: each within the tolerance, and the same best entry in each row.

        So must be the best one that is not banned. `place(i)` tells where row i comes from.
        """
        diff, growth = _differences(exported, eager), _growth(eager)
        self.max_abs_logit_diff = max(self.max_abs_logit_diff, float(diff.max()))
        self.max_abs_logit = max(self.max_abs_logit, float(_sizes(eager).max()))
        self.tolerance = max(self.tolerance, TOLERANCE * float(growth.max()))
        decided = _check_best(exported, eager, diff, growth, place)
        if self.banned:
            ours, theirs = self._choosable(exported), self._choosable(eager)
            decided = _check_best(ours, theirs, diff, growth, place)
        self._count_tokens(decided, decided)

    def _choosable(self, logits: Floats) -> Floats:
        return without(self.banned, logits)

    def _count_tokens(self, decided: NDArray[np.bool_], equal: NDArray[np.bool_]) -> None:
        self.tokens_compared += int(decided.sum())
        self.tokens_equal += int((decided & equal).sum())
        self.tokens_undecided += int((~decided).sum())

    def step(self, exported: StepLogits, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare all that tokens are chosen from: logits, and the likeliest tokens of each row.

        Those must be the graph's own largest logits to the bit, with their log-probabilities in the
        eager model's distribution, within twice the tolerance: a logit's, and that of the total.
        """
        self.logits(exported.all_logits, eager, place)
        _check_top(exported, place)
        theirs = np.take_along_axis(_log_softmax(eager), exported.top_ids, axis=1)
        allowed = 2 * TOLERANCE * _growth(eager)
        _check_logprobs(exported, theirs, allowed, "the eager model's distribution", place)

    def values(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare embeddings [N, D]: each value within the tolerance."""
        diff, allowed = self._vector_differences(exported, eager), TOLERANCE * _growth(eager)
        bad = ~(diff < allowed)
        if bad.any():
            i = int(bad.argmax())
            raise CertificateError(
                f"{place(i)}: the embedding differs by {diff[i]:.3g}, allowed {allowed[i]:g}"
            )

    def alignment(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare attention to the source [N, L]: each share within the tolerance."""
        self.alignment_tolerance = TOLERANCE
        diff = self._alignment_differences(exported, eager)
        bad = ~(diff < TOLERANCE)
        if bad.any():
            i = int(bad.argmax())
            raise CertificateError(
                f"{place(i)}: the alignment differs by {diff[i]:.3g}, allowed {TOLERANCE:g}"
            )

    def _vector_differences(self, exported: Floats, eager: Floats) -> Floats:
        diff = _differences(exported, eager)
        self.max_abs_vector_diff = max(self.max_abs_vector_diff or 0.0, float(diff.max()))
        return diff

    def _alignment_differences(self, exported: Floats, eager: Floats) -> Floats:
        diff = _differences(exported, eager)
        self.max_abs_alignment_diff = max(self.max_abs_alignment_diff or 0.0, float(diff.max()))
        return diff

    def step_bits(
        self, batched: StepLogits, alone: StepLogits, place: Callable[[int], str]
    ) -> bool:
        """Compare all that a step gives in a batch with what it gives alone; return if it is equal.

        Alone as many of the likeliest tokens were asked for as in the batch, or more. Where the
        batch was not asked for attention to the source, it is NaN.
        """
        k = batched.top_ids.shape[1]
        equal = self.bits(batched.all_logits, alone.all_logits, place)
        for name in ("top_ids", "top_logits", "top_logprobs"):
            ours, solo = getattr(batched, name), getattr(alone, name)[:, :k]
            equal &= self.bits(ours, solo, _named(place, name))
        if batched.alignment is not None and alone.alignment is not None:
            (asked,) = (~np.isnan(batched.alignment[:, 0])).nonzero()
            ours, solo = batched.alignment[asked], alone.alignment[asked]
            if len(asked):
                of_row = _named(lambda i: place(int(asked[i])), "alignment")
                equal &= self._alignment_bits(ours, solo, of_row)
        return equal

    def _alignment_bits(self, batched: Floats, alone: Floats, place: Callable[[int], str]) -> bool:
        return self.bits(batched, alone, place)

    def bits(
        self, batched: NDArray[np.generic], alone: NDArray[np.generic], place: Callable[[int], str]
    ) -> bool:
        """Compare rows [N, ...] computed in a batch with the same rows computed alone.

        Return whether they are equal.
        """
        differs = (batched != alone).reshape(len(alone), -1).any(axis=1)
        if not self._needs_equal_bits and differs.any():
            self.batch_invariant = False
            differs = _are_far(batched, alone)
        if differs.any():
            i = int(differs.argmax())
            with np.errstate(invalid="ignore"):
                diff = np.abs(batched[i].astype("f8") - alone[i]).max()
            raise CertificateError(
                f"{place(i)}: the row differs by {diff:.3g} from the same row computed alone; "
                "it must not depend on its neighbours, nor on what its memory held before"
            )
        return self.batch_invariant


class LossyComparison(Comparison):
    """Counts how much a format loses; only what is not a number is refused at once."""

    _counts = (*Comparison._counts, "_num_logits", "_sum_of_diffs", "_sum_of_squares")

    def __init__(self, *, banned: Tokens = ()) -> None:
        super().__init__(banned=banned)
        self._num_logits = 0
        self._sum_of_diffs = 0.0
        self._sum_of_squares = 0.0  # of the eager logits, around the mean of their position
        self.max_value_loss = 0.0  # of an embedding: the difference's length, by its own

    @property
    def mean_abs_logit_diff(self) -> float:
        """Return the mean difference of all logits that were compared."""
        return self._sum_of_diffs / max(1, self._num_logits)

    @property
    def logit_std(self) -> float:
        """Return the spread of the eager model's logits within a position."""
        return math.sqrt(self._sum_of_squares / max(1, self._num_logits))

    def logits(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare logits [N, V]; of the best entry in each row, count whether it is the same.

        That is the best one that is not banned; of all of them the differences count.
        """
        _refuse_no_number(exported, place)
        diff = np.abs(exported - eager)
        self.max_abs_logit_diff = max(self.max_abs_logit_diff, float(diff.max()))
        self.max_abs_logit = max(self.max_abs_logit, float(_sizes(eager).max()))
        self._num_logits += diff.size
        self._sum_of_diffs += float(diff.sum())
        written = np.where(eager > NEVER, eager, np.nan)
        self._sum_of_squares += float(np.nanvar(written, axis=-1).sum()) * eager.shape[-1]
        ours, theirs = self._choosable(exported), self._choosable(eager)
        decided = _lead(theirs) > UNDECIDED * _growth(eager)
        self._count_tokens(decided, ours.argmax(-1) == theirs.argmax(-1))

    def step(self, exported: StepLogits, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare logits; the likeliest tokens must be those of the graph's own logits."""
        self.logits(exported.all_logits, eager, place)
        _check_top(exported, place)

    def values(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Refuse embeddings [N, D] that are not numbers; note how far they are off."""
        _refuse_no_number(exported, place)
        self._vector_differences(exported, eager)
        off = np.linalg.norm(exported - eager, axis=-1)
        size = np.maximum(np.linalg.norm(eager, axis=-1), _SHORTEST)
        self.max_value_loss = max(self.max_value_loss, float((off / size).max()))

    def alignment(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Refuse attention to the source [N, L] that is not numbers, or not shares of one.

        Note how far it is off.
        """
        _refuse_no_number(exported, place)
        _refuse_no_shares(exported, place)
        self._alignment_differences(exported, eager)

    def bits(
        self, batched: NDArray[np.generic], alone: NDArray[np.generic], place: Callable[[int], str]
    ) -> bool:
        """Compare rows [N, ...] computed in a batch with the same rows computed alone."""
        _refuse_no_number(batched.reshape(len(batched), -1), place)
        equal = bool((batched == alone).all())
        self.batch_invariant &= equal
        return equal

    def _alignment_bits(self, batched: Floats, alone: Floats, place: Callable[[int], str]) -> bool:
        equal = self.bits(batched, alone, place)
        if not equal:
            self.alignment(batched, alone, place)
        return equal


def _check_best(
    exported: Floats, eager: Floats, diff: Floats, growth: Floats, place: Callable[[int], str]
) -> NDArray[np.bool_]:
    """Return where the eager model decides; refuse another best entry there, and differences."""
    decided, allowed = _lead(eager) > UNDECIDED * growth, TOLERANCE * growth
    got, expected = exported.argmax(-1), eager.argmax(-1)
    bad = ~(diff < allowed) | (decided & (got != expected))  # a NaN is bad too
    if bad.any():
        i = int(bad.argmax())
        raise CertificateError(
            f"{place(i)}: the exported model's best entry is {got[i]}, the eager model's "
            f"{expected[i]}; largest logit difference {diff[i]:.3g}, allowed {allowed[i]:g}"
        )
    return decided


def _are_far(batched: NDArray[np.generic], alone: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return which rows [N, ...] differ by more than two roundings may; ids are never far."""
    if not np.issubdtype(alone.dtype, np.floating):
        return np.zeros(len(alone), np.bool_)
    ours, solo = (np.asarray(rows, np.float32).reshape(len(alone), -1) for rows in (batched, alone))
    return ~(_differences(ours, solo) <= 2 * TOLERANCE * _growth(solo))


def _refuse_no_number(exported: NDArray[Any], place: Callable[[int], str]) -> None:
    bad = ~np.isfinite(exported).all(axis=-1)
    if bad.any():
        raise CertificateError(
            f"{place(int(bad.argmax()))}: the exported model gives what is not a finite number; "
            "export with --weights fp32"
        )


def _refuse_no_shares(exported: Floats, place: Callable[[int], str]) -> None:
    total = exported.sum(axis=-1)
    bad = (np.abs(total - 1) > TOLERANCE) | (exported < 0).any(axis=-1)
    if bad.any():
        i = int(bad.argmax())
        raise CertificateError(
            f"{place(i)}: the alignment is not shares of one: they add up to {total[i]:.6g}"
        )


def _check_top(exported: StepLogits, place: Callable[[int], str]) -> None:
    """Refuse likeliest tokens that are not those of the same row's logits, the lower id first."""
    expected = step_logits(exported.all_logits, exported.top_ids.shape[1])
    for name in ("top_ids", "top_logits"):
        found, wanted = getattr(exported, name), getattr(expected, name)
        if (found != wanted).any():
            i, rank = np.argwhere(found != wanted)[0]
            raise CertificateError(
                f"{place(int(i))}: {name} {rank + 1} of {found.shape[1]} is {found[i, rank]}, by "
                f"the graph's own logits it is {wanted[i, rank]}"
            )
    own = np.take_along_axis(_log_softmax(exported.all_logits), exported.top_ids, axis=1)
    allowed = TOLERANCE * _growth(exported.all_logits)
    _check_logprobs(exported, own, allowed, "the graph's own logits", place)


def _check_logprobs(
    exported: StepLogits,
    expected: NDArray[np.float64],
    allowed: Floats,
    whose: str,
    place: Callable[[int], str],
) -> None:
    diff = np.where(expected > NEVER, np.abs(exported.top_logprobs - expected), 0)
    bad = ~(diff < allowed[:, None])
    if bad.any():
        i, rank = np.argwhere(bad)[0]
        raise CertificateError(
            f"{place(int(i))}: top_logprobs {rank + 1} of {bad.shape[1]} is "
            f"{exported.top_logprobs[i, rank]:.6g}, by {whose} it is {expected[i, rank]:.6g}"
        )


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return exact


def _named(place: Callable[[int], str], name: str) -> Callable[[int], str]:
    return lambda i: f"{place(i)}, {name}"


def _differences(exported: Floats, eager: Floats) -> Floats:
    """Return the largest difference in each row [N, V]."""
    with np.errstate(invalid="ignore"):  # infinity less infinity: NaN, which is no agreement
        diff: Floats = np.abs(exported - eager).max(axis=-1)
    return diff


def _growth(eager: Floats) -> Floats:
    """Return how many times the tolerance is allowed in each row [N, V]: at least once."""
    growth: Floats = np.maximum(_sizes(eager).max(axis=-1) / FULL_SIZE, 1)
    return growth


def _sizes(eager: Floats) -> Floats:
    """Return the absolute values, 0 for tokens that are never written."""
    sizes: Floats = np.where(np.isfinite(eager) & (eager > NEVER), np.abs(eager), 0)
    return sizes


def _lead(logits: Floats) -> Floats:
    """Return by how much the best entry of each row [V] is ahead of the second."""
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf, np.float32)
    second_and_best = np.partition(logits, -2, axis=-1)[:, -2:]
    return second_and_best[:, 1] - second_and_best[:, 0]
