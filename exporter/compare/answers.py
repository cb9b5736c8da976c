"""How far what a one-pass model says of items is from what another form of it says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.one_pass.scores import SCORES
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import Answers, Contract

Values = NDArray[np.floating]


def compare_answers(
    contract: Contract, num_items: int, seen: Mapping[str, Values], other: Mapping[str, Values]
) -> Answers:
    """Compare what both say of the same items.

    `logits` [N, C], or [T, C] of all tokens of a labeller's texts; `embedding` [N, D].
    """
    found: dict[str, float] = {"items": num_items}
    if LOGITS in seen:
        scores = SCORES[contract.label_scores]
        ours, theirs = scores(seen[LOGITS]), scores(other[LOGITS])
        largest = float(np.abs(ours - theirs).max())
        if contract.label_scores == "none" or ours.shape[-1] == 1:  # a reranker
            one, two = (np.sign(side - side.T) for side in (ours[:, :1], theirs[:, :1]))
            pairs = np.triu(two != 0, 1)  # whose order says something
            found |= {"max_score_diff": largest, "pairs": int(pairs.sum())}
            found["pairs_turned"] = int((pairs & (one == -two)).sum())
        else:
            is_one = contract.label_scores == "softmax"
            labels = [one.argmax(-1) if is_one else one > 0.5 for one in (ours, theirs)]
            turned = (labels[0] != labels[1]).reshape(len(ours), -1).any(axis=-1)
            found |= {"labels": len(ours), "labels_turned": int(turned.sum())}
            found["max_probability_diff"] = largest
    if EMBEDDING in seen:
        one, two = seen[EMBEDDING], other[EMBEDDING]
        found["max_number_diff"] = float(np.abs(one - two).max())
        found["max_vector_loss"] = float(vector_losses(one, two).max())
        found["neighbours_kept"] = int((nearest(one) == nearest(two)).sum())
    return Answers.model_validate(found)


def vector_losses(ours: Values, theirs: Values) -> NDArray[np.float64]:
    """Return 1 less the cosine of vectors [N, D], without what float64 rounds: [N].

    It is 1 where one of the two has no length, 0 where both have none.
    """
    one, other = _of_length_1(ours), _of_length_1(theirs)
    # Half the squared distance of vectors of length 1, which loses nothing where they are near.
    found: NDArray[np.float64] = np.square(one - other).sum(axis=-1) / 2
    empty = ~one.any(axis=-1), ~other.any(axis=-1)
    return np.where(empty[0] ^ empty[1], 1.0, found)


def nearest(vectors: Values) -> NDArray[np.int64]:
    """Return the number of the nearest other vector by its cosine, of vectors [N, D]: [N]."""
    unit = _of_length_1(vectors)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    found: NDArray[np.int64] = cosines.argmax(axis=-1)
    return found


def _of_length_1(vectors: Values) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1, keepdims=True)
    found: NDArray[np.float64] = wide / np.where(lengths > 0, lengths, 1)
    return found
