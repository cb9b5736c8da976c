"""Sentences that a checkpoint keeps to be tried with, and random tokens beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

SEED = 20170612  # all draws that try a model

Tokens = tuple[int, ...]


def encode_samples(samples: Sequence[str], tokenizer: Tokenizer | None, limit: int) -> list[Tokens]:
    """Return sentences as token ids, each of `limit` at most; none without a tokenizer."""
    if tokenizer is None:
        return []
    prompts = [tuple(tokenizer.encode(text).ids[:limit]) for text in samples]
    return [prompt for prompt in prompts if prompt]


def random_tokens(rng: np.random.Generator, vocab_size: int, length: int) -> Tokens:
    """Return token ids, any of the vocabulary."""
    return tuple(rng.integers(0, vocab_size, length).tolist())


class TokenSampler:
    """Deals the tokens of a vocabulary: all of them once before any comes again, its ends first.

    A table that an export cuts or shifts is wrong at an end, and a token that was never tried
    would not show it.
    """

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        self._rng, self._vocab_size = rng, vocab_size
        ends = dict.fromkeys((0, vocab_size - 1))
        between = rng.permutation(np.arange(1, max(1, vocab_size - 1)))
        self._left = deque([*ends, *between.tolist()])

    def sample(self, length: int) -> Tokens:
        """Return the next token ids."""
        while len(self._left) < length:
            self._left.extend(self._rng.permutation(self._vocab_size).tolist())
        return tuple(self._left.popleft() for _ in range(length))
