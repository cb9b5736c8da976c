"""The texts or pictures that two models which answer in one pass are compared on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest
from engine.one_pass.item_encoder import EncodedItem, ItemEncoder
from engine.one_pass.prediction import PredictionItem
from engine.package.manifest import Contract
from engine.text.tokenizer import Tokenizer
from engine.wording import listed
from exporter.compare.lines import rows_of
from exporter.pictures import SUFFIXES, find_pictures
from exporter.prover.item_cases import draw_images, given_texts
from exporter.samples import SEED, random_tokens

_RANDOM_TEXTS = 16
_RANDOM_LEN = 12
_CONFIG = EngineConfig()


@dataclass(frozen=True, eq=False)
class Item:
    """A text, a pair of texts or a picture, and the prediction that it should get."""

    where: str  # its line, or its file
    encoded: EncodedItem
    # None: unknown. Labels: the one, or all that hold by themselves; a labeller has one per word.
    reference: tuple[str, ...] | None = None
    text: bytes = b""  # a labeller's, in UTF-8

    @property
    def words(self) -> list[tuple[int, int]]:
        """The range of bytes of each word of the text; spaces part words."""
        return [match.span() for match in re.finditer(rb"\S+", self.text)]


def read_texts(path: Path, contract: Contract, tokenizer: Tokenizer) -> list[Item]:
    """Return the lines of a UTF-8 file: a text, and behind a tab its label, where there is one.

    A pair of texts has a tab between them, and one more before its label. A labeller's line has
    behind the tab a label for every word. Empty lines are skipped. Raises ConfigError, naming all
    lines that cannot be used.
    """
    encoder = ItemEncoder(contract, tokenizer, _CONFIG)
    items, problems = [], []
    for number, line in rows_of(path):
        where = f"line {number}"
        try:
            items.append(_read(line, where, contract, encoder))
        except InvalidRequest as error:
            problems += [f"{where}: {violation.description}" for violation in error.violations]
        except ConfigError as error:
            problems.append(str(error))
    _check(path, items, problems, "has no lines; give a text in each")
    return items


def read_images(path: Path, contract: Contract) -> list[Item]:
    """Return the pictures of a directory; the folder of it that one lies in has its label's name.

    A folder that has the name of no label says nothing. Raises ConfigError, naming all pictures
    that cannot be read.
    """
    encoder = ItemEncoder(contract, None, _CONFIG)
    items, problems = [], []
    for file, label in find_pictures(path):
        where = str(file.relative_to(path))
        reference = (label,) if label in contract.labels else None
        try:
            (encoded,) = encoder.encode([PredictionItem(file.read_bytes())], where)
            items.append(Item(where, encoded, reference))
        except InvalidRequest as error:
            problems += [f"{where}: {violation.description}" for violation in error.violations]
        except OSError as error:
            problems.append(f"{where}: {error.strerror}")
    _check(path, items, problems, f"has no {', '.join(SUFFIXES)} files; give a folder with some")
    return items


def random_items(contract: Contract) -> list[Item]:
    """Return texts of random tokens, or images of noise, always the same."""
    if contract.image is not None:
        drawn = draw_images(contract.image)
    else:
        assert contract.encoding is not None, "a model of one pass reads texts or sees images"
        encoding, rng = contract.encoding, np.random.default_rng(SEED)
        drawn = []
        for number in range(_RANDOM_TEXTS):
            length = min(1 + number % _RANDOM_LEN, encoding.max_len)
            drawn += given_texts([random_tokens(rng, encoding.vocab_size, length)], encoding)
    return [Item(f"random item {number}", one) for number, one in enumerate(drawn, start=1)]


def _read(line: str, where: str, contract: Contract, encoder: ItemEncoder) -> Item:
    """Return the item of a line; InvalidRequest or ConfigError if it cannot be used."""
    text, *others = line.split("\t")
    is_told = contract.task != "embed"  # vectors have no references
    most = 2 if contract.task == "label" or not is_told else 3
    if len(others) >= most:
        raise ConfigError(f"{where}: {len(others) + 1} columns are more than {most}")
    reference = others.pop() if others and is_told else ""
    (encoded,) = encoder.encode([PredictionItem(text, others[0] if others else None)], where)
    item = Item(where, encoded, text=text.encode() if contract.task == "label" else b"")
    return replace(item, reference=_labels(reference, item, contract))


def _labels(text: str, item: Item, contract: Contract) -> tuple[str, ...] | None:
    """Return the labels that a line says; ConfigError for what is none, or one too many."""
    if not text.strip():
        return None
    if contract.label_scores == "none":
        raise ConfigError(f"{item.where}: this model tells numbers; leave the label out")
    labels: tuple[str, ...] = (text.strip(),)
    if contract.task == "label":
        labels = tuple(text.split())
        if len(labels) != len(item.words):
            raise ConfigError(f"{item.where}: {len(labels)} labels for {len(item.words)} words")
    elif contract.label_scores == "sigmoid":
        labels = tuple(part.strip() for part in text.split(","))
    for label in labels:
        if label not in contract.labels:
            raise ConfigError(f"{item.where}: {label!r} is none of {listed(contract.labels)}")
    return labels


def _check(path: Path, items: Sequence[Item], problems: Sequence[str], none: str) -> None:
    if problems:
        total = len(items) + len(problems)
        raise ConfigError(
            f"{path}: {len(problems):,} of {total:,} cannot be used: {listed(problems, '; ')}"
        )
    if not items:
        raise ConfigError(f"{path} {none}")
