"""How far two models that answer in one pass are from each other, on texts or pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.one_pass.prediction import ItemPrediction
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import Answers
from engine.text.tokenizer import Tokenizer
from exporter.checkpoint import TOKENIZER_NAME
from exporter.compare.answers import compare_answers
from exporter.compare.items import Item, random_items, read_images, read_texts
from exporter.compare.predictions import Compared, Prediction, as_served
from exporter.compare.predictors import Predictor, open_predictor
from exporter.compare.sides import BATCH_SIZE, Progress, other_files, quantiles, size_of
from exporter.graphs.contracts import Contract

_ALIKE = {  # parts of contracts without which two models are not compared answer by answer
    "task": "what they tell",
    "labels": "their labels",
    "label_scores": "how they score labels",
    "encoding": "the texts that they take",
    "image": "the pictures that they take",
}


class FirstAnswer(NamedTuple):
    """The first answer that is another."""

    where: str
    answers: tuple[str, str]


@dataclass(frozen=True)
class OfPredictor:
    """Measurements of one of the two models."""

    path: str
    num_bytes: int  # bytes of its files
    items_per_second: float  # up to eight of one length beside each other
    accuracy: float | None  # share of references that it tells; None: there are none


@dataclass(frozen=True)
class AnswerDifference:
    """Measurements of the second model, compared with the first."""

    items: int
    items_equal: int  # both answer the same
    answers: int  # one per token from a labeller, else one per item
    answers_equal: int
    # The share of labels that differ. Numbers and vectors have no labels: their largest difference,
    # 1 - cosine for vectors, where as much as rounding makes counts as none.
    answer_loss: float
    score_quantiles: dict[str, float] | None  # largest difference of an answer; None: no scores
    cosine_quantiles: dict[str, float] | None  # 1 - cosine; None: no vectors
    compared: Answers
    references: int  # labels that are given
    one: OfPredictor
    other: OfPredictor
    first: FirstAnswer | None

    @property
    def accuracy_loss(self) -> float | None:
        """The share of references that the second model tells less often; None: there are none."""
        if self.one.accuracy is None or self.other.accuracy is None:
            return None
        return self.one.accuracy - self.other.accuracy


def compare_items(
    one: Path,
    other: Path,
    text: Path | None = None,
    images: Path | None = None,
    progress: Progress | None = None,
) -> AnswerDifference:
    """Compare two packages, or a package and a checkpoint, by what they say of texts or pictures.

    `text` and `images` are as `read_texts` and `read_images` take them; without them random tokens
    or noise do. Raises ConfigError for models that differ in their contract or tokenizer, and for
    lines or pictures that cannot be used.
    """
    sides = open_predictor(one), open_predictor(other)
    contract, its = sides[0].contract, sides[1].contract
    differ = [
        what for name, what in _ALIKE.items() if getattr(contract, name) != getattr(its, name)
    ]
    problems = [*differ, *other_files(one, other)]
    if problems:
        raise ConfigError(
            f"{one} and {other} differ in {', '.join(problems)}; their answers are not the same, "
            "give two forms of one model"
        )
    items = _items(one, contract, text, images)
    for side in sides:
        side.predict([items[0].encoded])  # the first call of all is slower, whoever makes it
    found = [_Answers(side) for side in sides]
    done = 0
    for _, group in groupby(sorted(items, key=_length), _length):
        members = list(group)
        for first in range(0, len(members), BATCH_SIZE):
            batch = members[first : first + BATCH_SIZE]
            for model in found:
                model.ask(batch)
            done += len(batch)
            if progress is not None:
                progress(done, len(items))
    return _difference(found, items)


def _items(path: Path, contract: Contract, text: Path | None, images: Path | None) -> list[Item]:
    if contract.encoding is not None:
        if images is not None:
            raise ConfigError(f"{path} takes texts, not pictures; give --text")
        if text is not None:
            encoding = contract.encoding
            tokenizer = Tokenizer(
                path / TOKENIZER_NAME,
                encoding.vocab_size,
                cut_at=encoding.cut_at,
                cuts_left=encoding.cuts_left,
            )
            return read_texts(text, contract, tokenizer)
    elif text is not None:
        raise ConfigError(f"{path} takes pictures, not texts; give --images")
    elif images is not None:
        return read_images(images, contract)
    return random_items(contract)


class _Answers:
    """The answers of one of the models, and the time that they take."""

    def __init__(self, side: Predictor) -> None:
        self.side = side
        self.predictions: dict[Item, Prediction] = {}
        self.seconds = 0.0
        self._predictions: list[ItemPrediction] = []

    def ask(self, items: Sequence[Item]) -> None:
        """Ask the model of items of one length."""
        started = time.perf_counter()
        found = self.side.predict([item.encoded for item in items])
        self.seconds += time.perf_counter() - started
        for item, prediction in zip(items, found, strict=True):
            if prediction is None:
                raise ConfigError(f"{self.side.path} gives no finite numbers for {item.where}")
            self._predictions.append(prediction)
            self.predictions[item] = as_served(prediction, self.side.contract)

    def outputs(self) -> dict[str, NDArray[np.float32]]:
        """Return logits of all positions, and vectors, as far as the model has them."""
        logits = [one.logits for one in self._predictions if one.logits.size]
        vectors = [one.embedding for one in self._predictions if one.embedding.size]
        found = {EMBEDDING: np.stack(vectors)} if vectors else {}
        if logits:
            found[LOGITS] = np.concatenate([one.reshape(-1, one.shape[-1]) for one in logits])
        return found

    def summary(self) -> OfPredictor:
        """Return what was found of the model."""
        right = [hit for item, one in self.predictions.items() for hit in one.hits(item)]
        return OfPredictor(
            path=str(self.side.path),
            num_bytes=size_of(self.side.path),
            items_per_second=len(self.predictions) / self.seconds,
            accuracy=sum(right) / len(right) if right else None,
        )


def _length(item: Item) -> int:
    return item.encoded.length


def _difference(found: Sequence[_Answers], items: Sequence[Item]) -> AnswerDifference:
    one, other = (model.predictions for model in found)
    compared = [one[item].compared(other[item]) for item in items]
    equal = np.concatenate([result.equal for result in compared])  # one per answer
    scores = [result.scores for result in compared if result.scores is not None]
    cosines = [result.cosine for result in compared if result.cosine is not None]
    is_label = any(one[item].labels for item in items)
    return AnswerDifference(
        items=len(items),
        items_equal=sum(bool(result.equal.all()) for result in compared),
        answers=len(equal),
        answers_equal=int(equal.sum()),
        answer_loss=float(1 - equal.mean() if is_label else max(r.distance for r in compared)),
        score_quantiles=quantiles(np.concatenate(scores)) if scores else None,
        cosine_quantiles=quantiles(1 - np.array(cosines)) if cosines else None,
        compared=compare_answers(
            found[0].side.contract, len(items), found[1].outputs(), found[0].outputs()
        ),
        references=sum(len(one[item].hits(item)) for item in items),
        one=found[0].summary(),
        other=found[1].summary(),
        first=next(_others(one, other, items, compared), None),
    )


def _others(
    one: Mapping[Item, Prediction],
    other: Mapping[Item, Prediction],
    items: Sequence[Item],
    compared: Sequence[Compared],
) -> Iterator[FirstAnswer]:
    """Yield the first other answer of every item that has one."""
    for item, result in zip(items, compared, strict=True):
        if not result.equal.all():
            place = int(result.equal.argmin())
            answers = one[item].text(place), other[item].text(place)
            if result.cosine is not None and not any(answers):
                answers = "", f"cosine {result.cosine:.6f} to A's"
            yield FirstAnswer(item.where + one[item].place(place, item), answers)
