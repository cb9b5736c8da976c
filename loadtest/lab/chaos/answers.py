"""Which answers were right, and what was wrong with the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tokenweir import GeneratedSequence

T = TypeVar("T")
Verdict = Literal["right", "lost", "doubled", "different"]


def verdict(got: GeneratedSequence, expected: GeneratedSequence) -> Verdict:
    """Say whether a sequence is what it has to be, bit for bit.

    "lost" has only a part of the tokens, "doubled" has all of them and more.
    """
    if got == expected:
        return "right"
    if got.token_ids == expected.token_ids:
        return "different"  # in its text, its log-probabilities or its end
    if _is_within(got.token_ids, expected.token_ids):
        return "lost"
    return "doubled" if _is_within(expected.token_ids, got.token_ids) else "different"


def _is_within(some: Sequence[T], all_: Sequence[T]) -> bool:
    """Return whether the first are among the second, in their order."""
    rest = iter(all_)
    return all(one in rest for one in some)


@dataclass
class Tally:
    """The outcomes of the streams."""

    right: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    broken: int = 0  # messages were missing, twice or other ones, and the client has noticed
    hung: int = 0  # no end within their timeout
    failed: Counter[str] = field(default_factory=Counter)  # that said so, by code, reason and place
    num_tokens: int = 0  # in the right ones

    def judge(self, got: GeneratedSequence, expected: GeneratedSequence) -> Verdict:
        """Count a sequence."""
        found = verdict(got, expected)
        setattr(self, found, getattr(self, found) + 1)
        if found == "right":
            self.num_tokens += len(got.token_ids)
        return found

    @property
    def num_wrong(self) -> int:
        """Streams that were not right and did not say so."""
        return self.lost + self.doubled + self.different + self.broken

    @property
    def is_good(self) -> bool:
        """Whether answers came, all of them right or with an error that says why not."""
        return bool(self.right) and not (self.num_wrong or self.hung)
