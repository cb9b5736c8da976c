"""Finds stop strings in streamed text, holding back what may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class StopMatcher:
    """Cuts a text at the first stop string that is complete in it.

    The stop string whose last character comes first in the text matches, or the first given one of
    several that end at the same character. So a match never waits for text behind it, and does not
    depend on how the text was cut into pieces. The time per character does not depend on the text
    before (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop_strings)
        if not all(self._stops):
            raise ValueError("a stop string must have at least one character")
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._lengths = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there is a stop string to look for."""
        return bool(self._stops)

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Return what may be sent now that `text` has come.

        Text behind a match is dropped. A stop string that would become complete in this text is let
        through if `may_match` is false.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for i, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None and may_match:
                self.matched = stop
                whole, self._held = self._held + text[: i + 1], ""
                return whole if self._include_stop else whole[: -len(stop)]
        return self._hold_back(self._held + text)

    def finish(self) -> str:
        """Return what is held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopMatcher:
        """Return a copy that goes its own way."""
        copied = copy(self)
        copied._lengths = self._lengths.copy()
        return copied

    def _advance(self, char: str) -> str | None:
        """Take one character in; return the stop string it completes."""
        complete = None
        for n, stop in enumerate(self._stops):
            length, fallback = self._lengths[n], self._fallbacks[n]
            while length and (length == len(stop) or stop[length] != char):
                length = fallback[length - 1]
            length += stop[length] == char
            self._lengths[n] = length
            if complete is None and length == len(stop):
                complete = stop
        return complete

    def _hold_back(self, text: str) -> str:
        if self._include_stop:
            return text
        most = 0  # characters at the text's end that may still become a stop string
        for stop, fallback, length in zip(self._stops, self._fallbacks, self._lengths, strict=True):
            most = max(most, length if length < len(stop) else fallback[length - 1])
        sendable = len(text) - most
        self._held = text[sendable:]
        return text[:sendable]


def _fallbacks(pattern: str) -> tuple[int, ...]:
    """Return, per prefix of the pattern, the length of its longest proper prefix and suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        length += pattern[i] == pattern[length]
        table[i] = length
    return tuple(table)
