"""Which answers were right, and what was wrong with the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tokenweir import GeneratedSequence
from tokenweir.compare import differences

Verdict = Literal["right", "lost", "doubled", "different"]


def verdict(got: GeneratedSequence, expected: GeneratedSequence) -> Verdict:
    """Return whether a sequence is what it has to be, bit for bit.

    "lost" has only a part of the tokens, "doubled" has all of them and more.
    """
    found = {one.field: one for one in differences(vars(expected), vars(got))}
    if not found:
        return "right"
    tokens = found.get("token_ids")  # else its text, log-probabilities or end is another
    return "different" if tokens is None else tokens.kind


@dataclass
class Tally:
    """The outcomes of the streams."""

    right: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    broken: int = 0  # messages were missing, twice or other ones, and the client has noticed
    hung: int = 0  # no end within their timeout
    failed: Counter[str] = field(default_factory=Counter)  # by code, reason and place
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
