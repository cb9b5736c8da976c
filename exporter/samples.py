"""Sentences that a checkpoint keeps to be tried with, and random tokens beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

SEED = 20170612  # of all that is drawn to try a model

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
