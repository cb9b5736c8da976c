"""Says in one line what is wrong with much, and the line stays short however much it is."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from pydantic import ValidationError

_MAX_NAMED = 8
_MAX_PROBLEMS = 32
_MAX_CHARS = 120


def listed(items: Collection[object], separator: str = ", ", limit: int = _MAX_NAMED) -> str:
    """Return the first items, each cut short, and how many more there are."""
    named = separator.join(shortened(item) for item in islice(items, limit))
    more = len(items) - limit
    return f"{named} and {more:,} more" if more > 0 else named


def shortened(value: object) -> str:
    """Return the text of a value, of a long one the beginning."""
    text = str(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def problems_of(error: ValidationError, whole: str) -> str:
    """Return what pydantic found wrong, a field each; `whole` is the name of all of it."""
    return joined(
        [
            f"{shortened('.'.join(map(str, e['loc'])) or whole)}: {e['msg']}{_given(e['input'])}"
            for e in error.errors(include_url=False, include_context=False)
        ]
    )


def joined(problems: Collection[str]) -> str:
    """Return sentences as one line, the first of them if they are many."""
    return "; ".join(islice(problems, _MAX_PROBLEMS)) + (
        f"; and {len(problems) - _MAX_PROBLEMS:,} more" if len(problems) > _MAX_PROBLEMS else ""
    )


def _given(value: object) -> str:
    is_scalar = isinstance(value, str | int | float)
    return f", got {shortened(repr(value))}" if is_scalar else ""
