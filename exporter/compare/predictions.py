"""A model's prediction for one item: labels, numbers or a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.one_pass.prediction import ItemPrediction
from engine.one_pass.scores import SCORES
from exporter.compare.answers import vector_losses
from exporter.compare.items import Item
from exporter.graphs.contracts import Contract

ROUNDING = 1e-6  # 1 - cosine of vectors that are equal but for float32
_NUMBERS_ROUNDING = 1e-4  # numbers, likewise
_MOST_NUMBERS = 4  # shown of an answer in numbers

Values = NDArray[np.float64]
Label = tuple[str, ...]  # the names of one, or of all that hold by themselves


class Compared(NamedTuple):
    """Two models on one item."""

    equal: NDArray[np.bool_]  # [A], by answer
    scores: Values | None  # [A], the largest difference of an answer's scores
    cosine: float | None
    distance: float  # between numbers, or vectors; 0: no more than rounding makes


@dataclass(frozen=True, eq=False)
class Prediction:
    """A model's A answers to one item: a labeller has one per token, other models one."""

    labels: tuple[Label, ...]  # A; (): numbers or a vector only
    scores: Values | None  # [A, num_labels]
    vector: Values | None  # [D]
    spans: tuple[tuple[int, int], ...] = ()  # a labeller's tokens, in bytes

    def compared(self, other: Prediction) -> Compared:
        """Compare with another model's prediction for the item."""
        cosine, scores = None, None
        if self.vector is not None and other.vector is not None:
            cosine = 1 - float(vector_losses(self.vector, other.vector))
        if self.scores is not None and other.scores is not None:
            scores = np.abs(self.scores - other.scores).max(axis=-1, initial=0)
        if self.labels:
            pairs = zip(self.labels, other.labels, strict=True)
            return Compared(np.array([a == b for a, b in pairs]), scores, cosine, 0.0)
        if scores is not None:
            distance, rounding = float(scores.max()), _NUMBERS_ROUNDING
        else:
            assert cosine is not None, "a model gives scores or a vector"
            distance, rounding = 1 - cosine, ROUNDING
        is_equal = distance <= rounding
        return Compared(np.array([is_equal]), scores, cosine, 0.0 if is_equal else distance)

    def hits(self, item: Item) -> list[bool]:
        """Return, for each label that the item should have, whether it is predicted."""
        if item.reference is None:
            return []
        if item.text:
            found = []  # labels of the first token that begins in each word
            for start, end in item.words:
                begins = (i for i, (first, _) in enumerate(self.spans) if start <= first < end)
                place = next(begins, None)
                found.append(() if place is None else self.labels[place])
            return [(tag,) == label for tag, label in zip(item.reference, found, strict=True)]
        return [set(item.reference) == set(self.labels[0])]

    def text(self, answer: int) -> str:
        """Return an answer as a person reads it; nothing for a vector."""
        if self.scores is None:
            return ""
        scores = self.scores[answer]
        if not self.labels:
            return " ".join(f"{value:.6g}" for value in scores[:_MOST_NUMBERS])
        ranked = sorted(scores.tolist(), reverse=True)
        pairs = zip(self.labels[answer], ranked, strict=False)
        return ", ".join(f"{label} {score:.4f}" for label, score in pairs) or "no label"

    def place(self, answer: int, item: Item) -> str:
        """Say which of the answers of an item it is, where it has several."""
        if not self.spans:
            return f", token {answer + 1}" if len(self.labels) > 1 else ""
        start, end = self.spans[answer]
        return f", token {answer + 1} {item.text[start:end].decode(errors='replace')!r}"


def as_served(prediction: ItemPrediction, contract: Contract) -> Prediction:
    """Return a prediction as it would be served."""
    logits = prediction.logits
    vector = prediction.embedding.astype(np.float64) if prediction.embedding.size else None
    if not logits.size:
        return Prediction((), None, vector)
    scores = SCORES[contract.label_scores](logits.reshape(-1, logits.shape[-1]))  # [A, num_labels]
    names = contract.labels or tuple(map(str, range(scores.shape[-1])))
    if contract.label_scores == "none":
        labels: tuple[Label, ...] = ()
    elif contract.label_scores == "sigmoid":
        likeliest = np.argsort(-scores, axis=-1, kind="stable")
        labels = tuple(
            tuple(names[i] for i in order if row[i] > 0.5)
            for row, order in zip(scores, likeliest, strict=True)
        )
    else:
        labels = tuple((names[best],) for best in scores.argmax(axis=-1))
    return Prediction(labels, scores, vector, prediction.spans)
