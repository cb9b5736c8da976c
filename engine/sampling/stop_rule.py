"""When a sequence ends: the one rule for every way to choose its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.requests.events import FinishReason
from engine.requests.request import SamplingParams
from engine.requests.text import Detokenizer, GenerationTokenizer


class End(NamedTuple):
    """Why a sequence ends, and the stop that it has matched."""

    reason: FinishReason
    stop: str | int | None = None


class StopRule:
    """Says which token of a request ends a sequence; a stop goes before a limit.

    What text says of it, `push_text` does.
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
        self._params = params
        self._forced_at = self.max_new_tokens if params.forced_end is not None else 0

    def end_of(
        self, token_id: int, num_generated: int, text: Detokenizer | None = None
    ) -> End | None:
        """Return why a sequence ends with a token, the one that is `num_generated`; None: not.

        `text` is the one before the token; None if there are no stop strings to find.
        """
        end = self._end_of_token(token_id, num_generated)
        return end if text is None else push_text(text, [token_id], end, self._params)[1]

    def _end_of_token(self, token_id: int, num_generated: int) -> End | None:
        if num_generated == self._forced_at:
            return End(self._limit)
        if token_id in self._eos_ids:
            return End(FinishReason.EOS)
        if token_id in self._stop_ids:
            return End(FinishReason.STOP, token_id)
        if num_generated >= self.max_new_tokens:
            return End(self._limit)
        return None


def searched_text(
    params: SamplingParams, tokenizer: GenerationTokenizer, prefix_ids: Sequence[int]
) -> Detokenizer:
    """Return the text in which stop strings are found, behind the given prefix."""
    # With the stop no text is held back, so that there is less to copy for every candidate.
    text = new_text(params, tokenizer, len(prefix_ids), include_stop=True)
    text.push(prefix_ids)
    return text


def new_text(
    params: SamplingParams, tokenizer: GenerationTokenizer, num_prefix: int, *, include_stop: bool
) -> Detokenizer:
    """Return the empty text of a sequence whose first `num_prefix` tokens, given, end nothing."""
    return tokenizer.detokenizer(
        params.stop_strings,
        include_stop=include_stop,
        min_new_tokens=num_prefix + max(1, params.min_new_tokens),
        skip_special=params.skip_special_tokens,
    )


def push_text(
    text: Detokenizer, token_ids: Sequence[int], end: End | None, params: SamplingParams
) -> tuple[str, End | None]:
    """Put the next tokens of a sequence into its text; return what may be sent, and its end.

    `end` is that by the tokens alone. A stop string in the text goes before it. Not in the text are
    an end-of-sequence token and, unless stops are kept, a stop token; and what is forced for the
    limit's sake tells nothing of the text, so no stop string is looked for in it.
    """
    if end is None:
        piece, stop = text.push(token_ids)
        return piece, None if stop is None else End(FinishReason.STOP, stop)
    is_limit = end.reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL)
    if is_limit and params.forced_end is not None:
        text.ignore_stops()
    is_stop_token = isinstance(end.stop, int) and not params.include_stop
    if end.reason is FinishReason.EOS or is_stop_token:
        token_ids = token_ids[:-1]
    piece, _ = text.push(token_ids)
    rest, stop = text.finish()
    return piece + rest, end if stop is None else End(FinishReason.STOP, stop)
