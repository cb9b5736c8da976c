"""A model's prediction for one item: labels, numbers or a vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.one_pass.prediction import ItemPrediction
from engine.one_pass.scores import SCORES
from engine.package.manifest import Contract
from exporter.compare.answers import vector_losses
from exporter.compare.difference import Compared, First
from exporter.compare.items import Item

# Largest differences of what is equal but for float32: of numbers, and 1 - cosine of vectors.
_ROUNDING = {"scores": 1e-4, "vectors": 1e-6}
_MOST_NUMBERS = 4  # shown of an answer in numbers

Values = NDArray[np.float64]
Label = tuple[str, ...]  # the names of one, or of all that hold by themselves


@dataclass(frozen=True, eq=False)
class Prediction:
    """A model's A answers to one item: a labeller has one per token, other models one."""

    labels: tuple[Label, ...]  # A; (): numbers or a vector only
    scores: Values | None  # [A, num_labels]
    vector: Values | None  # [D]
    spans: tuple[tuple[int, int], ...] = ()  # a labeller's tokens, in bytes

    def compared(self, other: Prediction, item: Item) -> Compared:
        """Compare with the other model's prediction for the item."""
        differences = {}
        if self.scores is not None and other.scores is not None:
            differences["scores"] = np.abs(self.scores - other.scores).max(axis=-1, initial=0)
        if self.vector is not None and other.vector is not None:
            differences["vectors"] = vector_losses(self.vector, other.vector).reshape(1)
        if self.labels:
            distance = None
            pairs = zip(self.labels, other.labels, strict=True)
            equal = np.array([one == two for one, two in pairs], np.bool_)
        else:
            rounding = _ROUNDING["scores" if "scores" in differences else "vectors"]
            largest = float(next(iter(differences.values())).max())
            equal = np.array([largest <= rounding])
            distance = 0.0 if largest <= rounding else largest
        first = None
        if not equal.all():
            place = int(equal.argmin())
            texts = self._text(place), other._text(place)
            if "vectors" in differences and not any(texts):
                texts = "", f"cosine {1 - float(differences['vectors'][0]):.6f} to A's"
            first = First(item.where + self._place(place, item), texts)
        return Compared(equal, differences, first, distance)

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

    def _text(self, answer: int) -> str:
        """Return an answer as a person reads it; nothing for a vector."""
        if self.scores is None:
            return ""
        scores = self.scores[answer]
        if not self.labels:
            return " ".join(f"{value:.6g}" for value in scores[:_MOST_NUMBERS])
        ranked = sorted(scores.tolist(), reverse=True)
        pairs = zip(self.labels[answer], ranked, strict=False)
        return ", ".join(f"{label} {score:.4f}" for label, score in pairs) or "no label"

    def _place(self, answer: int, item: Item) -> str:
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
