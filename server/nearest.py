"""The known name that an unknown one may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like one that is not, as a whole and without its section."""

    def likeness(other: str) -> float:
        key, other_key = name.rpartition(".")[2], other.rpartition(".")[2]
        return _ratio(name, other) + _ratio(key, other_key)

    return max(known, key=likeness)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
