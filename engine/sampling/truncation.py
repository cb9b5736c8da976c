"""Decides which tokens may be drawn: top_k, top_p, min_p and typical_p, in that order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.requests.request import SamplingParams
from engine.sampling.logits import Floats
from engine.sampling.top_k import largest

Ids = NDArray[np.intp]

_NUM_BINS = 1024  # bins of keys, to find the border of top_p or typical_p
_BINNED_RANGE = 40.0  # tokens that are less likely by e**-40 share the last bin
_BLOCK = 512  # weights that are summed up at a time
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def tempered(logits: Floats, temperature: float | Floats, out: Floats | None = None) -> Floats:
    """Return logits over temperature, shifted so that the largest is 0 and none overflows.

    Logits are a row, or several with a temperature for each, [n, 1].
    """
    divisor = np.maximum(np.array(temperature, np.float32), SMALLEST_NORMAL)
    shifted: Floats = np.subtract(logits, logits.max(axis=-1, keepdims=True), out=out)
    with np.errstate(over="ignore"):  # to -inf: a probability of 0
        return np.divide(shifted, divisor, out=shifted)


def pick(weights: Floats, uniform: float) -> int:
    """Return the index at a share of all weights, 0 <= uniform < 1; never one whose weight is 0."""
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    target = uniform * blocks[-1]
    block = int(blocks.searchsorted(target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    cumulative = inside.cumsum(dtype=np.float64)
    target -= blocks[block - 1] if block else 0.0
    # The two sums may round differently: the last one that has a weight ends the block.
    last = int(cumulative.searchsorted(cumulative[-1]))
    return block * _BLOCK + min(int(cumulative.searchsorted(target, side="right")), last)


def truncate(scores: Floats, params: SamplingParams) -> tuple[Floats, Ids | None]:
    """Return the scores that may be drawn, of all tokens', and their ids; ids None: all may.

    Scores are logits over temperature, the largest 0. The lower ids of equals at a border stay.
    Both results are in the order of ids.
    """
    ids: Ids | None = None
    for is_wanted, find in (
        (0 < params.top_k < len(scores), lambda s: largest(s, params.top_k)),
        (params.top_p < 1, lambda s: _nucleus(s, params.top_p)),
        (params.min_p > 0, lambda s: (s >= math.log(params.min_p)).nonzero()[0]),
        (params.typical_p < 1, lambda s: _typical(s, params.typical_p)),
    ):
        if is_wanted:
            kept = find(scores)
            scores, ids = scores[kept], kept if ids is None else ids[kept]
    return scores, ids


class Truncations(NamedTuple):
    """How several rows are truncated, an entry a row."""

    num_columns: Ids  # how many of the likeliest tokens it uses, [n]
    temperature: Floats  # [n, 1]
    top_p: NDArray[np.float64]  # [n]; inf: all
    least: Floats  # log of min_p, [n, 1]; -inf: all

    @classmethod
    def of(cls, params: Sequence[SamplingParams], num_columns: Sequence[int]) -> Truncations:
        """Return those that requests ask for."""
        least = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return cls(
            np.array(num_columns, np.intp),
            np.array([p.temperature for p in params], np.float32)[:, None],
            np.array([p.top_p if p.top_p < 1 else math.inf for p in params], np.float64),
            np.array(least, np.float32)[:, None],
        )


def truncated_weights(
    scores: Floats, totals: NDArray[np.float64], how: Truncations
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return weights of the likeliest tokens of several rows, [n, k], 0 for what is not drawn.

    Scores are as above, best first; totals are those of the weights of all tokens, NaN if top_k
    comes first. The second result says whether the last column that is used was cut off, and with
    it all that come after, [n]. A row's results do not depend on the others: a sum is never over
    more than one row, zeros come last in it.
    """
    num_columns = how.num_columns
    is_used = np.arange(scores.shape[1]) < num_columns[:, None]
    weights = np.where(is_used, np.exp(scores), np.float32(0))
    before = weights.cumsum(axis=1, dtype=np.float64)
    needed = np.where(np.isnan(totals), before[:, -1], totals)
    before -= weights
    needed *= how.top_p
    is_drawn = is_used & (before < needed[:, None])
    is_drawn &= scores >= how.least
    is_cut = ~is_drawn[np.arange(len(scores)), num_columns - 1]
    return np.where(is_drawn, weights, np.float32(0)), is_cut


def _nucleus(scores: Floats, top_p: float) -> Ids:
    """Return where the fewest likeliest tokens are that have a probability of top_p in all."""
    return _first_until(-scores, np.exp(scores), top_p)


def _typical(scores: Floats, typical_p: float) -> Ids:
    """Return where the tokens closest to the expected information are, typical_p in all.

    Locally typical sampling, Meister et al. 2022.
    """
    weights = np.exp(scores)
    total = weights.sum(dtype=np.float64)
    information = np.float32(math.log(total)) - scores
    is_possible = weights > 0
    expected = (weights[is_possible] * information[is_possible]).sum(dtype=np.float64) / total
    return _first_until(np.abs(information - np.float32(expected)), weights, typical_p)


def _first_until(keys: Floats, weights: Floats, share: float) -> Ids:
    """Return where the fewest smallest keys are that have a share of the weight in all.

    Sorts only those around the border: keys, none below 0, are counted into bins first.
    """
    width = max(1e-6, min(float(keys.max()), _BINNED_RANGE)) / _NUM_BINS
    bins = np.minimum(keys / width, _NUM_BINS).astype(np.intp)
    total = np.bincount(bins, weights).cumsum()
    needed = share * total[-1]
    border = int(total.searchsorted(needed))
    inside = (bins == border).nonzero()[0]
    inside = inside[np.argsort(keys[inside], kind="stable")]
    before = weights[inside].cumsum(dtype=np.float64) - weights[inside]
    before += total[border - 1] if border else 0.0
    is_kept = bins < border
    is_kept[inside[before < needed]] = True
    kept: Ids = is_kept.nonzero()[0]
    return kept
