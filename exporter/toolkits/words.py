"""Vocabularies of toolkits: lists of words, whose places are their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.wording import shortened

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
        if not word or not count.isdigit():
            raise CheckpointError(
                f"{path}, line {number}: {shortened(repr(line))} is not a word, a space and a "
                "number; give the dictionary that `fairseq-preprocess` wrote"
            )
        words.append(word)
    return tuple(words)
