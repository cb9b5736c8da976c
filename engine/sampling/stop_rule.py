"""When a sequence ends: the one rule for every way to choose its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.requests.events import FinishReason
from engine.requests.request import SamplingParams
from engine.text.tokenizer import Detokenizer, Tokenizer


class End(NamedTuple):
    """Why a sequence ends, and the stop that it has matched."""

    reason: FinishReason
    stop: str | int | None = None


class StopRule:
    """Says which token of a request ends a sequence; a stop token goes before a limit.

    A stop string that the same token completes is not looked for: the maker of the text finds it.
    """

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], room: int) -> None:
        """`room` is how many new tokens the context holds behind what is given."""
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = FinishReason.CONTEXT_FULL
        self.max_new_tokens = room
        if params.max_new_tokens is not None and params.max_new_tokens <= room:
            self._limit = FinishReason.LENGTH
            self.max_new_tokens = params.max_new_tokens
        self.token_ids = self._eos_ids | self._stop_ids  # each of them ends a sequence
        self._forced_at = self.max_new_tokens if params.forced_end is not None else 0

    def end_of(
        self, token_id: int, num_generated: int, text: Detokenizer | None = None
    ) -> End | None:
        """Return why a sequence ends with a token, the one that is `num_generated`; None: not.

        `text` is the one before the token; None if there are no stop strings to find.
        """
        if num_generated == self._forced_at:
            return End(self._limit)
        if token_id in self._eos_ids:
            return End(FinishReason.EOS)
        if token_id in self._stop_ids:
            return End(FinishReason.STOP, token_id)
        if num_generated >= self.max_new_tokens:
            return End(self._limit)
        stop = None if text is None else text.push((token_id,)).stop
        return None if stop is None else End(FinishReason.STOP, stop)


def searched_text(
    params: SamplingParams, tokenizer: Tokenizer, prefix_ids: Sequence[int]
) -> Detokenizer:
    """Return the text in which stop strings are found, behind the given prefix."""
    # No text is held back if the stop is included, so there is less to copy for every candidate.
    text = new_text(params, tokenizer, len(prefix_ids), include_stop=True)
    text.push(prefix_ids)
    return text


def new_text(
    params: SamplingParams, tokenizer: Tokenizer, num_prefix: int, *, include_stop: bool
) -> Detokenizer:
    """Return the empty text of a sequence whose first `num_prefix` tokens, given, end nothing."""
    return Detokenizer(
        tokenizer,
        params.stop_strings,
        include_stop=include_stop,
        min_new_tokens=num_prefix + max(1, params.min_new_tokens),
        skip_special=params.skip_special_tokens,
    )
