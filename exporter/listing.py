"""How an error names what a file holds: so much of it as a person reads."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from itertools import islice

_MAX_NAMED = 32  # things in one list
_MAX_CHARS = 300  # of each


def listed(things: Collection[object], separator: str = ", ") -> str:
    """Return the first of them in one line, and how many there are besides."""
    named = [_clipped(str(thing)) for thing in islice(things, _MAX_NAMED)]
    more = len(things) - len(named)
    return separator.join([*named, *([f"and {more:,} more"] if more else [])])


def shortened(value: object) -> str:
    """Return a value as Python writes it, with the middle or the end left out where it is long."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = _MAX_CHARS
    return shortener.repr(value)


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
