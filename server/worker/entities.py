"""Makes entities of labelled tokens, as the token classification of transformers does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Strategy = Literal["simple", "first", "average", "max"]
Probabilities = NDArray[np.float64]

_OUTSIDE = "O"


@dataclass(frozen=True)
class Entity:
    """A stretch of a text with a label."""

    start: int  # bytes of the UTF-8 text
    end: int
    label: str  # without B- or I-
    probability: float
    index: int  # the label of its first part


@dataclass(frozen=True)
class _Part:
    """A token or word, and the label that was chosen for it."""

    start: int
    end: int
    index: int
    probability: float


def find_entities(
    probabilities: Probabilities,
    spans: Sequence[tuple[int, int]],
    continues: Sequence[bool],
    labels: Sequence[str],
    strategy: Strategy,
) -> list[Entity]:
    """Return the entities among tokens, in text order.

    probabilities (num_tokens, num_labels); `continues` tells of each token whether it goes on with
    the word before it.
    """
    count = len(spans)
    starts = [i for i in range(count) if strategy == "simple" or i == 0 or not continues[i]]
    parts = [  # tokens from first to last get one label
        _chosen(probabilities[first:last], spans[first:last], strategy)
        for first, last in pairwise([*starts, count])
    ]
    found = []
    for group in _groups(parts, labels):
        index, probability = group[0].index, sum(part.probability for part in group) / len(group)
        _, label = _read(labels[index])
        if label != _OUTSIDE:
            found.append(Entity(group[0].start, group[-1].end, label, probability, index))
    return found


def _chosen(
    probabilities: Probabilities, spans: Sequence[tuple[int, int]], strategy: Strategy
) -> _Part:
    if strategy == "average":
        row = probabilities.mean(axis=0)  # (num_labels,)
    else:
        surest = int(probabilities.max(axis=1).argmax()) if strategy == "max" else 0
        row = probabilities[surest]
    index = int(row.argmax())
    return _Part(spans[0][0], spans[-1][1], index, float(row[index]))


def _groups(parts: Sequence[_Part], labels: Sequence[str]) -> Iterator[list[_Part]]:
    """Yield neighbours of one label; one that begins an entity begins a group."""
    group: list[_Part] = []
    for part in parts:
        begins, name = _read(labels[part.index])
        if group and (begins or name != _read(labels[group[-1].index])[1]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _read(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the entity's."""
    begins = label.startswith("B-")
    return begins, label[2:] if begins or label.startswith("I-") else label
