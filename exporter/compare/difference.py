"""How far two models are from each other, on lines, texts or pictures that a person gives."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.package.manifest import Answers
from exporter.compare.sides import Side, batches, size_of
from exporter.progress import Progress, no_progress

_QUANTILES = (0.5, 0.9, 0.99, 1.0)

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class First(NamedTuple):
    """The first place at which the models answer otherwise."""

    where: str
    texts: tuple[str, str]


class Compared(NamedTuple):
    """Two models on one item."""

    equal: NDArray[np.bool_]  # [A], by answer: a token, a label of a token, else the only one
    differences: Mapping[str, NDArray[np.floating]]  # the largest of an answer, of each kind: [A]
    first: First | None  # None: both answer the same
    distance: float | None = None  # between numbers or vectors; None: answers are tokens or labels


@dataclass(frozen=True)
class OfSide:
    """Measurements of one of the two models."""

    path: str
    num_bytes: int  # bytes of its files
    per_second: float  # tokens that it writes for eight lines at once; else items, up to eight
    perplexity: float | None = None  # None: the text has too few tokens, inf: one is never written
    chrf: float | None = None  # to references; None: there are none
    bleu: float | None = None
    accuracy: float | None = None  # share of references that it tells; None: there are none


@dataclass(frozen=True)
class Difference:
    """Measurements of the second model, compared with the first."""

    items: int  # lines, texts or pictures
    items_equal: int  # both answer the same
    # Tokens that the first writes, up to its end; labels of tokens; of other models the items.
    answers: int
    answers_equal: int  # that the second gives, of tokens in the place of the first's
    # The share of tokens or labels that differ. Numbers and vectors: their largest difference,
    # 1 - cosine for vectors, where as much as rounding makes counts as none.
    answer_loss: float
    quantiles: dict[str, dict[str, float]]  # largest difference of an answer: logits, scores, ...
    one: OfSide
    other: OfSide
    first: First | None
    chrf_between: float | None = None  # the second's texts, to those of the first
    compared: Answers | None = None  # None: they generate
    references: int = 0  # labels that are given

    @property
    def chrf_loss(self) -> float:
        """Points of chrF that are lost: to references, else to what the first model writes."""
        if self.one.chrf is not None and self.other.chrf is not None:
            return self.one.chrf - self.other.chrf
        return 0.0 if self.chrf_between is None else 100.0 - self.chrf_between

    @property
    def accuracy_loss(self) -> float | None:
        """The share of references that the second model tells less often; None: there are none."""
        if self.one.accuracy is None or self.other.accuracy is None:
            return None
        return self.one.accuracy - self.other.accuracy


class Comparison(ABC, Generic[Item, Answer]):
    """Two models of one kind, and the items that both are asked for."""

    sides: tuple[Side, Side]
    items: Sequence[Item]
    amount: int  # tokens that are written, or items

    @abstractmethod
    def warm_up(self, side: int) -> None:
        """Let a model make its first call, which is slower, whoever makes it."""

    @abstractmethod
    def size(self, item: Item) -> int:
        """Return by what items are asked together."""

    @abstractmethod
    def ask(self, side: int, items: Sequence[Item]) -> list[Answer]:
        """Return what a model gives for items of one size."""

    @abstractmethod
    def compare(
        self, items: Sequence[Item], one: Sequence[Answer], other: Sequence[Answer]
    ) -> Iterator[Compared]:
        """Yield how far both are from each other on each item."""

    @abstractmethod
    def of_side(self, side: int) -> dict[str, Any]:
        """Return what else was found of a model, by the names of OfSide."""

    @abstractmethod
    def of_both(self) -> dict[str, Any]:
        """Return what else was found, by the names of Difference."""

    def difference(self, progress: Progress = no_progress) -> Difference:
        """Ask both models, and return what was found."""
        seconds, compared = [0.0, 0.0], dict[int, Compared]()
        for side in range(2):
            self.warm_up(side)

        def size(i: int) -> int:
            return self.size(self.items[i])

        for _, members in groupby(sorted(range(len(self.items)), key=size), size):
            for numbers in batches(list(members)):
                batch, answers = [self.items[i] for i in numbers], []
                for side in range(2):
                    started = time.perf_counter()
                    answers.append(self.ask(side, batch))
                    seconds[side] += time.perf_counter() - started
                compared |= zip(numbers, self.compare(batch, *answers), strict=True)
                progress(len(compared), len(self.items))
        found = [compared[i] for i in range(len(self.items))]
        equal = np.concatenate([one.equal for one in found])
        distances = [one.distance for one in found if one.distance is not None]
        one, other = (
            OfSide(
                path=str(side.path),
                num_bytes=size_of(side.path),
                per_second=self.amount / seconds[i],
                **self.of_side(i),
            )
            for i, side in enumerate(self.sides)
        )
        return Difference(
            items=len(found),
            items_equal=sum(one.first is None for one in found),
            answers=len(equal),
            answers_equal=int(equal.sum()),
            answer_loss=max(distances) if distances else float((~equal).mean()),
            quantiles={
                name: _quantiles(np.concatenate([one.differences[name] for one in found]))
                for name in found[0].differences
            },
            one=one,
            other=other,
            first=next((one.first for one in found if one.first), None),
            **self.of_both(),
        )


def _quantiles(values: NDArray[np.floating]) -> dict[str, float]:
    """Return the median, and what is above it, by name."""
    return {f"{q:.0%}": float(np.quantile(values, q)) for q in _QUANTILES}
