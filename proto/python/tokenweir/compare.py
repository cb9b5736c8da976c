"""Compares an answer with the one that it has to be, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Difference:
    """A field of an answer that is another than it has to be."""

    field: str
    wanted: Any
    got: Any  # None where the answer does not have the field

    @property
    def place(self) -> int:
        """The index of the first other element of a list."""
        pairs = zip(self.wanted, self.got, strict=False)
        shorter = min(len(self.wanted), len(self.got))
        return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)

    @property
    def kind(self) -> Literal["lost", "doubled", "different"]:
        """The kind of difference of a list.

        "lost": a part of the elements in their order; "doubled": all of them, and more.
        """
        if _is_within(self.got, self.wanted):
            return "lost"
        return "doubled" if _is_within(self.wanted, self.got) else "different"


def differences(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the fields of the wanted answer that are other ones in another answer."""
    for field, value in wanted.items():
        if field not in got or got[field] != value:
            yield Difference(field, value, got.get(field))


def _is_within(some: Sequence[Any], all_: Sequence[Any]) -> bool:
    """Return whether the first are among the second, in their order."""
    rest = iter(all_)
    return all(one in rest for one in some)
