"""Divides a text among the tokens that it came by."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise


class TokenTexts:
    """Tells which part of one text came by which token, while it comes.

    Text may come later than its token: that of a part of a character, or of what may become a
    stop string. A special token that does not stand in the text has no part.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._late: list[str] = []  # texts of tokens, which have not come

    def push(self, text: str, pieces: Sequence[bytes]) -> list[str]:
        """Return the part of each token; the first one has what came late, the last the rest."""
        expected = [*self._late, *map(self._decoder.decode, pieces)]
        late, self._late = len(self._late), []
        place, ends = 0, []
        for number, whole in enumerate(expected):
            # A tokenizer may put a space before the first word.
            found = whole if text.startswith(whole, place) else whole.removeprefix(" ")
            if text.startswith(found, place):
                place += len(found)
            elif whole.startswith(rest := text[place:]):
                self._late = [whole.removeprefix(rest), *expected[number + 1 :]]
                break
            ends.append(place)
        ends += [len(text)] * (len(expected) - len(ends))
        bounds = [0, *ends[late:-1], len(text)]
        return [text[start:end] for start, end in pairwise(bounds)] if pieces else []
