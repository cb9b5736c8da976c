"""Keeps what a model says to itself apart from its answer, while it comes."""

from __future__ import annotations

from typing import Literal

from engine.text.chat_format import THINK, THINK_END
from server.adapters.http.openai.tool_calls import CallReader
from server.adapters.http.requests import Json


class ReasoningReader:
    """Makes the `delta` objects of OpenAI's chunks from the text of one answer.

    White space around the reasoning is left out.
    """

    def __init__(self, inner: CallReader | None, *, is_begun: bool) -> None:
        """`inner` reads the rest; `is_begun`: the prompt ends with the mark of the beginning."""
        self._inner = inner
        self._place: Literal["before", "blank", "within", "behind", "rest"]
        self._place = "blank" if is_begun else "before"
        self._held = ""

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._inner is None else self._inner.num_calls

    def push(self, text: str) -> list[Json]:
        """Take the next piece of the text in; return what is certain now."""
        self._held += text
        found: list[Json] = []
        if self._place == "before":
            said = self._held.lstrip()
            if said.startswith(THINK):
                self._place, self._held = "blank", said.removeprefix(THINK)
            elif not THINK.startswith(said):
                self._place = "rest"
        if self._place == "blank" and (said := self._held.lstrip()):
            self._place, self._held = "within", said
        if self._place == "within":
            said, end, rest = self._held.partition(THINK_END)
            if end:
                self._place, self._held = "behind", rest
                found += _thought(said.rstrip())
            else:
                kept = _num_held(said)
                self._held = said[len(said) - kept :]
                found += _thought(said[: len(said) - kept])
        if self._place == "behind":
            if said := self._held.lstrip():
                self._place, self._held = "rest", said
            elif not found:
                found.append({"reasoning_content": ""})  # the mark's tokens are its own
        if self._place == "rest":
            said, self._held = self._held, ""
            found += self._rest(said)
        return found

    def finish(self, *, is_cut: bool = False) -> list[Json]:
        """Return what was held back, now that the text has ended.

        If it was cut, that may be the beginning of a mark, which is left out.
        """
        held, self._held = "" if is_cut else self._held, ""
        found = _thought(held.rstrip()) if self._place == "within" else []
        if self._place == "before":
            found += self._rest(held)
        return found + (self._inner.finish(is_cut=is_cut) if self._inner is not None else [])

    def _rest(self, text: str) -> list[Json]:
        if self._inner is not None:
            return self._inner.push(text)
        return [{"content": text}] if text else []


def _thought(text: str) -> list[Json]:
    return [{"reasoning_content": text}] if text else []


def _num_held(text: str) -> int:
    """Return the length of the end of a text that may be the mark, or the white space before it."""
    marks = (n for n in range(len(THINK_END) - 1, 0, -1) if text.endswith(THINK_END[:n]))
    begun = len(text) - next(marks, 0)
    return len(text) - len(text[:begun].rstrip())
