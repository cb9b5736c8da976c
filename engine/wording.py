"""Says in one line what is wrong with much, and the line stays short however much it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from pydantic import ValidationError

_MAX_NAMED = 32  # things in one list
_MAX_CHARS = 300  # a thing
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def listed(things: Collection[object], separator: str = ", ") -> str:
    """Return the first of them in one line, each cut short, and how many there are besides."""
    named = [shortened(thing) for thing in islice(things, _MAX_NAMED)]
    more = len(things) - len(named)
    return separator.join([*named, *([f"and {more:,} more"] if more else [])])


def shortened(value: object) -> str:
    """Return the text of a value, or the beginning of a long one.

    Everything but plain text is escaped: ends of lines, control sequences of a terminal.
    """
    text = str(value)[: _MAX_CHARS + 1]
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def size_of(num_bytes: float) -> str:
    """Return a number of bytes as "640 bytes", "38.1 MB" or "110 GB"."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:,.{0 if num_bytes >= 100 * size else 1}f} {unit}"
    return f"{num_bytes:.0f} bytes"


def problems_of(error: ValidationError, whole: str, names: Mapping[str, str] = {}) -> str:
    """Return what pydantic found wrong, a field each; `whole` is the name of all of it.

    `names` are those of fields that its reader knows by others.
    """
    problems = []
    for e in error.errors(include_url=False, include_context=False):
        where = ".".join(names.get(str(part), str(part)) for part in e["loc"]) or whole
        message = f"{e['msg'].removeprefix('Value error, ')}{_given(e['input'])}"
        message = f"{shortened(where)}: {message}" if where else message
        problems += message.split("; ")  # a check of ours tells all that it found in one
    return listed(problems, "; ")


def _given(value: object) -> str:
    is_scalar = isinstance(value, str | int | float)
    return f", got {shortened(repr(value))}" if is_scalar else ""
