"""Vocabularies of toolkits: lists of words, whose places are their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.wording import shortened
from exporter.toolkits.torch_file import Record

_MAX_BYTES = 2**27
_OVERWRITES = "#fairseq:overwrite"


@dataclass(frozen=True)
class Words:
    """A vocabulary, and which of its words say something about a text instead of being in it."""

    words: tuple[str, ...]  # by id; a later one of two that are equal counts
    unknown: str
    special: tuple[str, ...]
    end: str | None = None  # stands behind every source

    @property
    def ids(self) -> dict[str, int]:
        """The id of every word."""
        return {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)


def read_dictionary(path: Path, special: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a `dict.LANGUAGE.txt` of fairseq, behind the special ones.

    Raises CheckpointError that names the line where it is not a word, a space and a number.
    """
    try:
        lines = read_bounded(path, _MAX_BYTES).decode().split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    words = list(special)
    for number, line in enumerate(lines, 1):
        word, _, count = line.rstrip().removesuffix(f" {_OVERWRITES}").rpartition(" ")
        if not line.strip() and number == len(lines):
            break
        if not word or not count.removeprefix("-").isdigit():
            raise CheckpointError(
                f"{path}, line {number}: {shortened(repr(line))} is not a word, a space and a "
                "number; give the dictionary that `fairseq-preprocess` wrote"
            )
        words.append(word)
    return tuple(words)


def read_vocabulary(vocabulary: object, side: str, path: Path) -> tuple[str, ...]:
    """Return the words of a side in a file of OpenNMT-py: a list, or a field of torchtext.

    Raises CheckpointError for what is neither.
    """
    sides = vocabulary.items() if isinstance(vocabulary, dict) else vocabulary
    value = next((one for name, one in _pairs(sides) if name == side), None)
    found = _attribute(value, "fields")
    if pairs := _pairs(found):  # a field of several: the first of them
        found = pairs[0][1]
    found = _attribute(_attribute(found, "vocab"), "itos")
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise CheckpointError(
            f"{path}: vocab has no words of {side}, but {shortened(type(value).__name__)}"
        )
    return tuple(found)


def _attribute(value: object, name: str) -> object:
    return value.fields.get(name, value) if isinstance(value, Record) else value


def _pairs(value: object) -> list[tuple[object, object]]:
    items = list(value) if isinstance(value, Iterable) else []
    return [(one[0], one[1]) for one in items if isinstance(one, list | tuple) and len(one) == 2]
