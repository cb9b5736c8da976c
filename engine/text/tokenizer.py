"""Text to token ids and back, whole or as a stream."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import tokenizers

from engine.errors import PackageError
from engine.requests.text import Side
from engine.text.stop_strings import StopMatcher
from engine.text.tokenizer_file import read_tokenizer_file

_FIRST_HALF = 0xD800  # the lowest half of a surrogate pair


@dataclass(frozen=True)
class Encoding:
    """A text as token ids; one entry a token in each field."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]  # first byte and one past the last, in the UTF-8 text
    special: tuple[bool, ...]  # added by the tokenizer, such as [CLS]
    token_types: tuple[int, ...]  # 0; the second text of a pair may have 1
    continues: tuple[bool, ...] = ()  # goes on with the word of the token before it


class Piece(NamedTuple):
    """The result of one push."""

    text: str  # may be sent now; never retracted
    stop: str | None  # the stop string that ended the text, if one did


class Tokenizer:
    """The tokenizer of a package: `tokenizer.json` of the `tokenizers` library.

    Texts are never padded, and cut short only with `cut_at`, the most tokens of one, whatever the
    file says: a request that is too long is to be refused, not changed, unless the model's own
    library changes it. Raises PackageError if the file cannot be read, or has ids that are not
    below `vocab_size`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        vocab_size: int | None = None,
        *,
        cut_at: int | None = None,
        cuts_left: bool = False,  # the end of a text is kept
    ) -> None:
        try:
            found = read_tokenizer_file(path, vocab_size)
        except (ValueError, OSError) as error:
            raise PackageError(
                f"{path} is not a tokenizer of this model: {error}; give the tokenizer.json that "
                "it was trained with, or export the model again"
            ) from error
        self._tokenizer = found.tokenizer
        if cut_at is not None:  # the longer one of a pair loses tokens first
            side = "left" if cuts_left else "right"
            self._tokenizer.enable_truncation(cut_at, strategy="longest_first", direction=side)
        self.vocab_size = found.vocab_size
        # Names by id; the longer one of two that a text could be comes first.
        added = self._tokenizer.get_added_tokens_decoder().items()
        names = {token_id: token.content for token_id, token in added if token.special}
        self.special_names = dict(sorted(names.items(), key=lambda one: -len(one[1])))
        unknown = found.unknown
        self._unknown_id = (
            self._tokenizer.token_to_id(unknown) if isinstance(unknown, str) else unknown
        )
        steps = found.decoder.steps if found.decoder else []
        kinds = [step.type for step in steps]
        # A text of bytes that lacks the space before its first word, as those of our own tasks.
        self.drops_first_space = kinds[:1] == ["ByteLevel"] and (
            [step.takes_first_space for step in steps[1:]] == [True]
        )
        self.is_byte_level = kinds == ["ByteLevel"] or self.drops_first_space
        self._has_byte_fallback = "ByteFallback" in kinds
        self._ends_words = kinds == ["BPEDecoder"]  # with a space, behind the word
        self._bytes_of: dict[int, bytes] = {}  # only tokens that were asked for
        self._cutting: dict[tuple[int, Side], Tokenizer] = {}  # those that were asked for

    def cutting(self, most: int, side: Side) -> Tokenizer:
        """Return a tokenizer that cuts what has more tokens, of a pair the longer text."""
        if (found := self._cutting.get((most, side))) is None:
            found = self._cutting[most, side] = copy(self)
            found._tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            found._tokenizer.enable_truncation(most, strategy="longest_first", direction=side)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model wants around it."""
        return list(self._tokenizer.encode(text).ids)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that is a part of another: no special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_with_offsets(self, text: str, text_pair: str | None = None) -> Encoding:
        """Return ids and where each token stands in its text; special tokens stand at (0, 0)."""
        found = self._tokenizer.encode(text, text_pair)
        starts = [_byte_starts(text), _byte_starts(text_pair or "")]
        return Encoding(
            ids=tuple(found.ids),
            offsets=tuple(
                (starts[sequence or 0][first], starts[sequence or 0][last])
                for sequence, (first, last) in zip(found.sequence_ids, found.offsets, strict=True)
            ),
            special=tuple(map(bool, found.special_tokens_mask)),
            token_types=tuple(found.type_ids),
            continues=tuple(
                token_id != self._unknown_id and self._continues(text, token, *place)
                for token_id, token, place in zip(
                    found.ids, found.tokens, found.offsets, strict=True
                )
            ),
        )

    def _continues(self, text: str, token: str, first: int, last: int) -> bool:
        """Say whether a token goes on with a word, by the rule of transformers.

        A vocabulary that marks such pieces tells it by a token's length; else a space does.
        """
        if getattr(self._tokenizer.model, "continuing_subword_prefix", None):
            return len(token) != last - first
        return first > 0 and " " not in text[first - 1 : first + 1]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; special tokens and ids that have no token are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds in the middle of a text; a special token, its name.

        Bytes, for a token need not hold whole characters. Empty for an id that has no token.
        """
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = self._read_bytes(token_id)
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_names:
            return token.encode()
        if self.is_byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()  # an added token stands for itself
        if self.is_fallback_byte(token):
            return bytes([int(token[3:5], 16)])
        # A first (or last) token may lose its space; the difference that a second one makes is all.
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        added = twice[: -len(once)] if self._ends_words and once else twice[len(once) :]
        return added.encode()

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Return a decoder that takes one token after the other."""
        kind = _ByteLevelStream if self.is_byte_level else _WindowStream
        return kind(self, skip_special)

    def visible_token(self, token_id: int, *, skip_special: bool = True) -> str | None:
        """Return the token as the vocabulary has it; None if a decoded text leaves it out."""
        if skip_special and token_id in self.special_names:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    @property
    def special_tokens(self) -> list[str]:
        """The tokens that a decoded text leaves out."""
        return [self.special_names[token_id] for token_id in sorted(self.special_names)]

    def is_special(self, token_id: int) -> bool:
        """Say whether a decoded text leaves a token out that the vocabulary has."""
        return token_id in self.special_names

    def is_fallback_byte(self, token: str) -> bool:
        """Say whether a token such as <0xE3> stands for one byte."""
        return (
            self._has_byte_fallback
            and len(token) == len("<0xE3>")
            and token.startswith("<0x")
            and token.endswith(">")
        )


class SourceAndTarget(NamedTuple):
    """The tokenizer of what is read, and that of what is written or given as a beginning."""

    source: Tokenizer
    target: Tokenizer  # mostly the same


class Detokenizer:
    """The text of one sequence while its tokens arrive.

    All pieces together are exactly the decoded text of all tokens, cut at the first stop string
    (see StopMatcher): before it, or behind it with `include_stop`. A stop string that has the name
    of a special token is found where the token is, too, though the text does not show it. Whatever
    a token has behind the stop string is dropped. A piece holds whole characters only: bytes of an
    unfinished one wait, and become U+FFFD if the sequence ends first. The time per token does not
    grow with the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_new_tokens: int = 0,  # a stop string completed by an earlier token is plain text
        *,
        skip_special: bool = True,  # or the text shows special tokens
    ) -> None:
        self._stream = tokenizer.stream(skip_special=skip_special)
        self._hidden = _HiddenTokens(tokenizer, stop_strings if skip_special else ())
        self._include_hidden = include_stop and bool(self._hidden.chars)
        self._matcher = StopMatcher(
            [*stop_strings, *self._hidden.stops],
            include_stop=include_stop and not self._include_hidden,
        )
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next tokens in; after a match nothing is taken any more."""
        if not self._matcher.is_needed:
            return Piece(self._stream.push(token_ids), None)
        sendable: list[str] = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            self._num_tokens += 1
            text = self._stream.push((token_id,)) + self._hidden.chars.get(token_id, "")
            sendable.append(self._match(text))
        return Piece("".join(sendable), self._matched)

    def finish(self) -> Piece:
        """Return what was held back, now that the sequence has ended; it may hold a match, too."""
        text = ""
        if self._matcher.matched is None:
            text = self._match(self._stream.finish()) + self._hidden.shown(self._matcher.finish())
        return Piece(text, self._matched)

    def ignore_stops(self) -> None:
        """Take stop strings that become complete from now on as plain text."""
        self._min_new_tokens = sys.maxsize

    def fork(self) -> Detokenizer:
        """Return a copy that goes its own way."""
        copied = copy(self)
        copied._stream, copied._matcher = self._stream.fork(), self._matcher.fork()
        return copied

    @property
    def _matched(self) -> str | None:
        """The stop string that was found, as it was given."""
        found = self._matcher.matched
        return found if found is None else self._hidden.stops.get(found, found)

    def _match(self, text: str) -> str:
        found = self._matcher.push(text, may_match=self._num_tokens >= self._min_new_tokens)
        stop = self._matched if self._include_hidden else None
        return self._hidden.shown(found) + (stop or "")


class _HiddenTokens:
    """Characters in the place of special tokens, for a text that is searched and its stop strings.

    They are halves of surrogate pairs, which no decoded text has.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self.chars: dict[int, str] = {}  # by the id of a special token that a stop string names
        self.stops: dict[str, str] = {}  # the stop strings as given, by those with these
        for stop in stop_strings:
            hidden = stop
            for token_id, name in tokenizer.special_names.items():
                if name in hidden:
                    char = self.chars.setdefault(token_id, chr(_FIRST_HALF + len(self.chars)))
                    hidden = hidden.replace(name, char)
            if hidden != stop:
                self.stops.setdefault(hidden, stop)

    def shown(self, text: str) -> str:
        """Return a text without them."""
        for char in self.chars.values():
            text = text.replace(char, "")
        return text


class TextStream(Protocol):
    """Decodes tokens into text that is final, the same however many come at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens in; return the text that is certain now."""

    def finish(self) -> str:
        """Return the rest."""

    def fork(self) -> TextStream:
        """Return a copy that goes its own way."""


class _ByteLevelStream:
    """Stream of a byte-level tokenizer: every token is a string of bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.drops_first_space  # the next character, if it is one

    def push(self, token_ids: Sequence[int]) -> str:
        skipped = self._tokenizer.special_names if self._skip_special else ()
        bytes_of = self._tokenizer.token_bytes
        found = [bytes_of(token_id) for token_id in token_ids if token_id not in skipped]
        text = self._decoder.decode(b"".join(found))
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> _ByteLevelStream:
        copied = _ByteLevelStream(self._tokenizer, self._skip_special)
        copied._drops_space = self._drops_space
        copied._decoder.setstate(self._decoder.getstate())
        return copied


class _WindowStream:
    """Stream of any other tokenizer: decodes again from the last token whose text is final.

    A token's text depends on the one before it (a space between them, say), no further back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._context: list[int] = []  # the last token that is done with
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        text, ends_in_bytes = "", bool(self._waiting)
        for token_id in token_ids:
            token = self._tokenizer.visible_token(token_id, skip_special=self._skip_special)
            if token is None:
                continue
            is_byte = self._tokenizer.is_fallback_byte(token)
            if is_byte and not ends_in_bytes:  # the run of bytes is decoded as a whole
                text += self.finish()
            self._waiting.append(token_id)
            ends_in_bytes = is_byte
        return text if ends_in_bytes else text + self.finish()

    def finish(self) -> str:
        if not self._waiting:
            return ""
        skip = self._skip_special
        done = self._tokenizer.decode(self._context, skip_special=skip)
        ids = self._context + self._waiting
        text = self._tokenizer.decode(ids, skip_special=skip)[len(done) :]
        self._context, self._waiting = self._waiting[-1:], []
        return text

    def fork(self) -> _WindowStream:
        copied = _WindowStream(self._tokenizer, self._skip_special)
        copied._context, copied._waiting = self._context.copy(), self._waiting.copy()
        return copied


def _byte_starts(text: str) -> list[int]:
    """Return for every character, and for the end, the byte of the UTF-8 text it starts at."""
    return [0, *accumulate(len(char.encode()) for char in text)]


def _byte_of_char() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


# The byte-level alphabet of GPT-2: printable bytes stand for themselves, others from U+0100 on.
_BYTE_OF_CHAR = _byte_of_char()
