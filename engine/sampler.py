"""Chooses the next token of every sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.batch import Draw, Sampled
from engine.request import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_NUM_BINS = 1024  # of scores, to find the border of top_p
_BINNED_RANGE = 40.0  # less likely tokens by e**-40 and more share the last bin
_CACHED_FLOATS = 65_536  # worked on at a time, so that they stay in the processor's cache

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class Sampler:
    """Greedy choice and random sampling, a row at a time: no row's token depends on another row."""

    def __init__(self) -> None:
        self._stream = RandomStream()

    def sample(self, logits: Floats, draws: Sequence[Draw]) -> list[Sampled | None]:
        """Choose a token for each draw from its row of `logits`, [N, vocab_size].

        None stands for a row that holds NaN or infinity: its model has failed.
        """
        if not draws:
            return []
        likeliest = logits.argmax(axis=1)  # the lowest id among equals; NaN counts as largest
        largest = logits[np.arange(len(logits)), likeliest]
        log_total = _log_total(logits, largest)  # of exp(logit - largest)
        greedy = list(zip(likeliest.tolist(), (-log_total).tolist(), strict=True))
        is_finite = (np.isfinite(largest) & np.isfinite(log_total)).tolist()
        sampled: list[Sampled | None] = []
        for draw in draws:
            n = draw.logits_row
            if not is_finite[n]:
                sampled.append(None)
            elif draw.params.strategy == "greedy" and not draw.banned:
                sampled.append(Sampled(*greedy[n]))
            else:
                token_id = self._choose(logits[n], draw)
                sampled.append(
                    Sampled(token_id, float(logits[n, token_id] - largest[n] - log_total[n]))
                )
        return sampled

    def _choose(self, row: Floats, draw: Draw) -> int:
        if draw.banned:
            row = row.copy()
            row[list(draw.banned)] = -np.inf
        if draw.params.strategy == "greedy":
            return int(row.argmax())
        scores, ids = truncate(_tempered(row, draw.params.temperature), draw.params)
        # Tokens whose probability rounds to 0 take no room in the sum and so are never drawn.
        cumulative = np.exp(scores).cumsum(dtype=np.float64)
        uniform = self._stream.uniform(draw.seed, draw.sequence_index, draw.position)
        chosen = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        return chosen if ids is None else int(ids[chosen])


class RandomStream:
    """Random numbers by counter (Philox, Salmon et al. 2011): any of them at any time.

    The number depends on nothing but its three arguments, so that a token can be drawn again
    whatever shared the batch with it, and by another process.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state

    def uniform(self, seed: int, sequence_index: int, position: int) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        inner = self._state["state"]
        inner["key"][0] = seed
        inner["counter"][1:3] = position, sequence_index
        self._generator.state = self._state
        return float(int(self._generator.random_raw()) >> 11) * 2.0**-53


def truncate(scores: Floats, params: SamplingParams) -> tuple[Floats, Ids | None]:
    """Return the scores that top_k, then top_p, then min_p leave, and their token ids.

    Scores are logits over temperature, the largest 0. It always stays, and equals of the k-th stay
    with it. Both results are in the order of ids; ids None: all stay.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        threshold = np.partition(scores, -params.top_k)[-params.top_k]
        ids = (scores >= threshold).nonzero()[0]
        scores = scores[ids]
    if params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    if params.min_p > 0:
        kept = (scores >= math.log(params.min_p)).nonzero()[0]
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    return scores, ids


def _nucleus(scores: Floats, top_p: float) -> Ids:
    """Return where the fewest likeliest tokens are that have a probability of top_p in all.

    Sorts only those around the border: scores are counted into bins first. Of equals at the border
    the lower ids stay.
    """
    weights = np.exp(scores)
    width = max(1e-6, min(-float(scores.min()), _BINNED_RANGE)) / _NUM_BINS
    bins = np.minimum(scores / -width, _NUM_BINS).astype(np.intp)
    total = np.bincount(bins, weights).cumsum()
    needed = top_p * total[-1]
    border = int(total.searchsorted(needed))
    inside = (bins == border).nonzero()[0]
    inside = inside[np.argsort(-scores[inside], kind="stable")]
    before = weights[inside].cumsum(dtype=np.float64) - weights[inside]
    before += total[border - 1] if border else 0.0
    is_kept = bins < border
    is_kept[inside[before < needed]] = True
    kept: Ids = is_kept.nonzero()[0]
    return kept


def _tempered(row: Floats, temperature: float) -> Floats:
    """Return logits over temperature, shifted so that the largest is 0 and none overflows."""
    with np.errstate(over="ignore"):  # to -inf: a probability of 0
        shifted: Floats = (row - row.max()) / max(temperature, _SMALLEST_NORMAL)
    return shifted


def _log_total(logits: Floats, largest: Floats) -> Floats:
    """Return log(sum(exp(logits - largest))) of each row; not finite for a row that is not."""
    total = np.empty(len(logits), np.float32)
    height = max(1, _CACHED_FLOATS // logits.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(logits), height):
            rows = slice(first, first + height)
            shifted = logits[rows] - largest[rows, None]
            total[rows] = np.exp(shifted, out=shifted).sum(axis=1)
        return np.log(total, out=total)
