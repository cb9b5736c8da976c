"""When a sequence ends: the one rule for every way to choose its tokens."""

from __future__ import annotations

from typing import NamedTuple

from engine.requests.events import FinishReason
from engine.requests.request import SamplingParams
from engine.requests.text import Detokenizer


class End(NamedTuple):
    """Why a sequence ends, and the stop that it has matched."""

    reason: FinishReason
    stop: str | int | None = None


class StopRule:
    """Says which token of a request ends a sequence; a stop goes before a limit."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], room: int) -> None:
        """`room` is how many new tokens the context holds behind what is given."""
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = FinishReason.CONTEXT_FULL
        self.max_new_tokens = room
        if params.max_new_tokens is not None and params.max_new_tokens <= room:
            self._limit = FinishReason.LENGTH
            self.max_new_tokens = params.max_new_tokens
        self.token_ids = tuple(self._eos_ids | self._stop_ids)  # each of them ends a sequence
        # Where a token is forced for the limit's sake, it tells nothing of the text.
        self._forced_at = self.max_new_tokens if params.forced_end is not None else 0

    def end_of(
        self, token_id: int, num_generated: int, text: Detokenizer | None = None
    ) -> End | None:
        """Return why a sequence ends with a token, the one that is `num_generated`; None: not.

        `text` is the one with the token, where stop strings are looked for here.
        """
        if num_generated == self._forced_at:
            return End(self._limit)
        if token_id in self._eos_ids:
            return End(FinishReason.EOS)
        if token_id in self._stop_ids:
            return End(FinishReason.STOP, token_id)
        if text is not None and text.matched_stop is not None:
            return End(FinishReason.STOP, text.matched_stop)
        if num_generated >= self.max_new_tokens:
            return End(self._limit)
        return None
