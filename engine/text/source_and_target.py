"""The texts of a model that reads with one tokenizer and writes with another."""

from __future__ import annotations

from collections.abc import Sequence

from engine.requests.text import Detokenizer, GenerationTokenizer


class SourceAndTarget:
    """A GenerationTokenizer of two: what is read, and what is written or given as a beginning."""

    def __init__(self, source: GenerationTokenizer, target: GenerationTokenizer) -> None:
        self._source = source
        self._target = target

    def encode(self, text: str) -> list[int]:
        """Return the ids of a source."""
        return self._source.encode(text)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a part of what is written."""
        return self._target.encode_part(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to what is written."""
        return self._target.token_bytes(token_id)

    def source_token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a source."""
        return self._source.source_token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Say whether a token is left out of what is written."""
        return self._target.is_special(token_id)

    def detokenizer(
        self,
        stop_strings: Sequence[str],
        *,
        include_stop: bool,
        min_new_tokens: int,
        skip_special: bool,
    ) -> Detokenizer:
        """Return the empty text of what is written."""
        return self._target.detokenizer(
            stop_strings,
            include_stop=include_stop,
            min_new_tokens=min_new_tokens,
            skip_special=skip_special,
        )
