"""Finds the likeliest tokens of bare logits, as graphs with a top-k output do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logits import Floats, StepLogits

Ids = NDArray[np.intp]

MAX_COLUMNS = 256  # likeliest tokens that a graph is asked for; whole rows are read for more
_CACHED_FLOATS = 65_536  # worked on at a time, so that they stay in the processor's cache


def step_logits(logits: Floats, k: int) -> StepLogits:
    """Return logits, [N, vocab_size], with the k likeliest tokens of each row.

    The log-probabilities of a row that holds NaN or infinity are NaN, its top tokens are any.
    """
    k = min(k, logits.shape[1])
    with np.errstate(invalid="ignore"):
        if k == 1:
            top_ids = logits.argmax(axis=1)[:, None]
        else:
            top_ids = np.array([likeliest(row, k) for row in logits], np.intp).reshape(-1, k)
        top_logits = np.take_along_axis(logits, top_ids, axis=1)
        largest = logits.max(axis=1)
        top_logprobs = top_logits - largest[:, None] - _log_total(logits, largest)[:, None]
    return StepLogits(logits, top_ids.astype(np.int64, copy=False), top_logits, top_logprobs)


def likeliest(scores: Floats, k: int, likely_ids: NDArray[np.integer] | None = None) -> Ids:
    """Return what `largest` does, best first, the lower id first among equals."""
    kept = largest(scores, k, likely_ids)
    order: Ids = kept[np.argsort(-scores[kept], kind="stable")]
    return order


def largest(scores: Floats, k: int, likely_ids: NDArray[np.integer] | None = None) -> Ids:
    """Return the ids of the k largest scores in the order of ids; the lower ones of equals.

    Which they are is found sooner if most of them are among `likely_ids`.
    """
    if k >= len(scores):
        return np.arange(len(scores))
    if likely_ids is not None and len(likely_ids) >= k:
        least = np.partition(scores[likely_ids], -k)[-k]  # there are k that are not smaller
        if least > -np.inf:
            found: Ids = (scores >= least).nonzero()[0]
            return found if len(found) == k else found[largest(scores[found], k)]
    threshold = np.partition(scores, -k)[-k]
    kept: Ids = (scores >= threshold).nonzero()[0]
    if len(kept) > k:
        surplus = (scores[kept] == threshold).nonzero()[0][k - len(kept) :]
        kept = np.delete(kept, surplus)
    return kept if len(kept) == k else np.arange(k)  # NaN is larger than every threshold


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
