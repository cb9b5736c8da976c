"""Finds the token ids that a model does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.errors import FieldViolation

MAX_NAMED_IDS = 8  # wrong ids in one answer; one says enough, a million too much

PathOf = Callable[[int, int], str]  # by an id's place among the ids, and the id


def check_token_ids(ids: Iterable[int], vocab_size: int, path_of: PathOf) -> list[FieldViolation]:
    """Return one violation for each of the first ids that are outside the vocabulary."""
    wrong = [(i, token_id) for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size]
    return [
        FieldViolation(
            path_of(i, token_id),
            f"{token_id} is outside the vocabulary, 0 to {vocab_size - 1}",
        )
        for i, token_id in wrong[:MAX_NAMED_IDS]
    ]
