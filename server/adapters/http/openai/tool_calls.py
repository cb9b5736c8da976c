"""Reads calls of functions in what a model writes, while it comes."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Generator

from server.adapters.http.requests import Json

_Run = Generator[None, str, None]  # is sent every character

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG, _MISTRAL = "<|python_tag|>", "[TOOL_CALLS]"
_MARKS = (_HERMES, _PYTHON_TAG, _MISTRAL)
_ARGUMENTS = ("arguments", "parameters")
_ID_CHARS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's templates want so many


class CallReader:
    """Makes the `delta` objects of OpenAI's chunks from the text of one answer.

    The arguments of a call are handed on as they come, as the model wrote them. A beginning of a
    call that turns out to be none is content.
    """

    def __init__(
        self, tool_format: str, *, is_single: bool = False, is_required: bool = False
    ) -> None:
        """`is_single`: calls behind the first one are left out.

        `is_required`: the text is calls alone; of one that is cut before its name nothing is left.
        """
        self._most, self._is_required = 1 if is_single else None, is_required
        self.num_calls = 0
        self._deltas: list[Json] = []
        self._held = ""  # may become content, or the beginning of a call
        self._blank = ""  # white space, which is content if a text follows it
        self._has_text = False  # since the beginning, or the last call
        readers = {
            "hermes": self._hermes,
            "llama3_json": self._llama3_json,
            "mistral": self._mistral,
        }
        self._run = readers[tool_format]()
        next(self._run)

    def push(self, text: str) -> list[Json]:
        """Take the next piece of the text in; return what is certain now."""
        for char in text:
            self._run.send(char)
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Json]:
        """Return what was held back, now that the text has ended, or was cut."""
        if is_cut and self._held.startswith(_MARKS):
            self._held = ""
        if self.num_calls and not self._has_text and _HERMES_END.startswith(self._held):
            self._held = ""  # the answer was cut within the end of its last call
        self._flush()
        if not self.num_calls and self._blank:
            self._add(self._blank)
        return self._taken()

    def _taken(self) -> list[Json]:
        taken, self._deltas = self._deltas, []
        return taken

    def _say(self, text: str) -> None:
        if not self._has_text:
            self._blank += text
            if not self._blank.strip():
                return
            self._has_text, text, self._blank = True, self._blank, ""
        self._add(text)

    def _add(self, text: str) -> None:
        if self._is_required:
            return
        if self._deltas and "content" in self._deltas[-1]:
            self._deltas[-1]["content"] += text
        else:
            self._deltas.append({"content": text})

    def _flush(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._say(held)

    def _begin(self, name: str) -> None:
        self._held = self._blank = ""
        self._has_text = False
        self.num_calls += 1
        call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
        function = {"name": name, "arguments": ""}
        self._call({"id": call_id, "type": "function", "function": function})

    def _argue(self, text: str) -> None:
        last = self._deltas[-1].get("tool_calls") if self._deltas else None
        if last and last[0]["index"] == self.num_calls - 1:
            last[0]["function"]["arguments"] += text
        else:
            self._call({"function": {"arguments": text}})

    def _call(self, said: Json) -> None:
        if self._most is None or self.num_calls <= self._most:
            self._deltas.append({"tool_calls": [{"index": self.num_calls - 1, **said}]})

    # The formats. Each is asked for the next character, and ends with the text alone.

    def _hermes(self) -> _Run:
        while True:
            yield from self._until(_HERMES, dropped=_HERMES_END)
            yield from self._object()

    def _mistral(self) -> _Run:
        while True:
            yield from self._until(_MISTRAL)
            char = yield from self._next_but(" \n")
            if char != "[":
                yield from self._named(char)
                continue
            self._held += char
            while (char := (yield from self._next_but(" \n,"))) != "]":
                if not (yield from self._object(char)):
                    break

    def _llama3_json(self) -> _Run:
        is_call = True
        while is_call:
            self._held = text = ""
            while not text or (text != _PYTHON_TAG and _PYTHON_TAG.startswith(text)):
                self._held += yield
                text = self._held.lstrip("; \n" if self.num_calls else None)
            if text != _PYTHON_TAG:
                self._held = self._held.removesuffix(text)
                is_call = yield from self._object(text)
        while True:
            self._flush()
            self._held = yield

    def _until(self, marker: str, dropped: str | None = None) -> _Run:
        """Hand content on until a marker has come; another one is left out."""
        markers = (marker, dropped or marker)
        while self._held != marker:
            if self._held == dropped:
                if self._has_text:  # there was no call
                    self._say(dropped)
                elif self.num_calls:
                    self._argue("")  # the tokens of the end are those of the call
                self._held = self._blank = ""
            self._held += yield
            while not any(one.startswith(self._held) for one in markers):
                self._say(self._held[0])
                self._held = self._held[1:]

    def _next_but(self, skipped: str) -> Generator[None, str, str]:
        while (char := (yield)) in skipped:
            self._held += char
        return char

    def _named(self, char: str) -> _Run:
        """Read a name and its arguments, as in `name[ARGS]{...}`."""
        named = ""
        while char != "{":
            named += char
            self._held += char
            char = yield
        yield from self._object(char, named.partition("[")[0].strip())

    def _object(self, begun: str = "", name: str | None = None) -> Generator[None, str, bool]:
        """Read a call, or its arguments alone; return whether it is one.

        Other text has become content.
        """
        call, is_begun, chars = _Call(name), False, iter(begun)
        try:
            while not call.is_closed:
                char = next(chars, None) or (yield)
                if not is_begun:
                    self._held += char
                call.push(char)
                if call.name is not None and call.has_arguments:
                    if not is_begun:
                        self._begin(call.name)
                        is_begun = True
                    self._argue(call.taken())
        except (ValueError, RecursionError):
            self._flush()
        return is_begun


class _Call:
    """Reads {"name": ..., "arguments": {...}} a character at a time; ValueError for other things.

    It looks at no more of the arguments than where they end.
    """

    def __init__(self, name: str | None = None) -> None:
        """With a name, the arguments alone are to come."""
        self.name = name
        self.has_arguments = self._is_bare = name is not None
        self.is_closed = False
        self._arguments = ""  # not taken yet
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None  # the member whose value comes
        self._member: list[str] = []  # the key, or the value, so far
        self._num_members = 0

    def taken(self) -> str:
        """Return what is new of the arguments."""
        taken, self._arguments = self._arguments, ""
        return taken

    def push(self, char: str) -> None:
        """Take the next character in."""
        before, is_plain = self._depth, not self._in_string
        self._scan(char)
        if before == 0:
            if char not in "{ \n":
                raise ValueError("no object")
            self._arguments += char.strip() if self._is_bare else ""
        elif self._is_bare:
            self._arguments += char
            self.is_closed = self._depth == 0
        elif before == 1 and is_plain and char in ":,}]":
            self._end_of_part(char)
        else:
            self._member.append(char)
            if self._key in _ARGUMENTS and max(before, self._depth) > 1:
                self._arguments += char

    def _scan(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._in_string = char != '"'
            self._is_escaped = char == "\\"
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")

    def _end_of_part(self, char: str) -> None:
        """Take in a key, or a value, behind which this character stands."""
        part = "".join(self._member).strip()
        self._member = []
        if char == ":" and self._key is None:
            self._key = json.loads(part)
            self.has_arguments |= self._key in _ARGUMENTS
        elif char in ",}" and self._key is not None:
            self._end_of_value(part)
            self._key = None
        else:
            raise ValueError("no member")
        if char == "}":
            if self.name is None or not (self.has_arguments or self._num_members == 1):
                raise ValueError("no call")
            if not self.has_arguments:
                self.has_arguments, self._arguments = True, "{}"
            self.is_closed = True

    def _end_of_value(self, part: str) -> None:
        self._num_members += 1
        if self._key == "name":
            self.name = json.loads(part)
            if not self.name or not isinstance(self.name, str):
                raise ValueError("no name")
        elif self._key in _ARGUMENTS and part[:1] not in ("{", "["):
            value = json.loads(part)
            self._arguments = value or "{}" if isinstance(value, str | None) else part
