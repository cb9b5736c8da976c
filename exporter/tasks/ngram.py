"""An add-one trigram model over tokens: what a trained GPT must beat."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence


class AddOneTrigram:
    """P(c | a, b) = (count(a, b, c) + 1) / (count(a, b) + vocab_size)."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._trigrams = Counter(zip(ids, ids[1:], ids[2:], strict=False))
        self._bigrams = Counter(itertools.pairwise(ids[:-1]))
        self._vocab_size = vocab_size

    def probability(self, first: int, second: int, third: int) -> float:
        """Return the probability of `third` after `first` and `second`."""
        seen = self._trigrams[first, second, third]
        return (seen + 1) / (self._bigrams[first, second] + self._vocab_size)

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """Return the nats of all ids but the first; before the first there is its like.

        The first id is taken as seen twice, so that the second has a context of two.
        """
        padded = [ids[0], *ids]
        return -sum(
            math.log(self.probability(*three))
            for three in zip(padded, padded[1:], padded[2:], strict=False)
        )
