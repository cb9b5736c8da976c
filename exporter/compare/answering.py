"""Compares two models that answer in one pass by their labels, numbers or vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.one_pass.batch import split
from engine.one_pass.prediction import ItemPrediction
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import Contract
from engine.text.tokenizer import Tokenizer
from exporter.checkpoint import TOKENIZER_NAME
from exporter.compare.answers import compare_answers
from exporter.compare.difference import Compared, Comparison
from exporter.compare.items import Item, random_items, read_images, read_texts
from exporter.compare.predictions import Prediction, as_served
from exporter.compare.sides import Side

_ALIKE = {  # parts of contracts without which two models are not compared answer by answer
    "task": "what they tell",
    "labels": "their labels",
    "label_scores": "how they score labels",
    "encoding": "the texts that they take",
    "image": "the pictures that they take",
}


def differing(one: Contract, other: Contract) -> list[str]:
    """Return what keeps two models from being compared answer by answer."""
    return [what for name, what in _ALIKE.items() if getattr(one, name) != getattr(other, name)]


class Answering(Comparison[Item, ItemPrediction | None]):
    """Counts the answers that are others."""

    def __init__(
        self, sides: tuple[Side, Side], text: Path | None = None, images: Path | None = None
    ) -> None:
        """Read `text` or `images`; without them take random tokens or noise."""
        self.sides = sides
        self._contract = sides[0].contract
        self._predict = [side.predict for side in sides if side.predict]
        self.items = _items(sides[0].path, self._contract, text, images)
        self.amount = len(self.items)
        self._found: tuple[list[ItemPrediction], list[ItemPrediction]] = [], []
        self._hits: tuple[list[bool], list[bool]] = [], []  # references that each one tells

    def warm_up(self, side: int) -> None:
        """See Comparison."""
        self.ask(side, self.items[:1])

    def size(self, item: Item) -> int:
        """See Comparison."""
        return item.encoded.length

    def ask(self, side: int, items: Sequence[Item]) -> list[ItemPrediction | None]:
        """See Comparison; None stands for numbers that are not finite."""
        encoded = [item.encoded for item in items]
        return split(self._predict[side](encoded), encoded)

    def compare(
        self,
        items: Sequence[Item],
        one: Sequence[ItemPrediction | None],
        other: Sequence[ItemPrediction | None],
    ) -> Iterator[Compared]:
        """See Comparison."""
        served = [self._served(side, items, given) for side, given in enumerate((one, other))]
        for item, ours, theirs in zip(items, *served, strict=True):
            yield ours.compared(theirs, item)

    def of_side(self, side: int) -> dict[str, Any]:
        """See Comparison."""
        return {"accuracy": float(np.mean(self._hits[side])) if self._hits[side] else None}

    def of_both(self) -> dict[str, Any]:
        """See Comparison."""
        one, other = map(_outputs, self._found)
        answers = compare_answers(self._contract, len(self.items), other, one)
        return {"compared": answers, "references": len(self._hits[0])}

    def _served(
        self, side: int, items: Sequence[Item], given: Sequence[ItemPrediction | None]
    ) -> list[Prediction]:
        served = []
        for item, prediction in zip(items, given, strict=True):
            if prediction is None:
                path = self.sides[side].path
                raise ConfigError(f"{path} gives no finite numbers for {item.where}")
            self._found[side].append(prediction)
            served.append(as_served(prediction, self._contract))
            self._hits[side].extend(served[-1].hits(item))
        return served


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


def _outputs(found: Sequence[ItemPrediction]) -> dict[str, NDArray[np.float32]]:
    """Return logits of all positions, and vectors, as far as the model has them."""
    logits = [one.logits for one in found if one.logits.size]
    vectors = [one.embedding for one in found if one.embedding.size]
    outputs = {EMBEDDING: np.stack(vectors)} if vectors else {}
    if logits:
        outputs[LOGITS] = np.concatenate([one.reshape(-1, one.shape[-1]) for one in logits])
    return outputs
