"""Makes normalizers of the `tokenizers` library of a SentencePiece model's table of characters.

SentencePiece replaces, at every place of a text, the longest key of its table. The library's own
normalizer for such a table goes by graphemes instead, and loses marks: e, dot below, circumflex
becomes e with a dot below. Here the table is asked for single characters alone, kept apart by a
separator that it drops, and what several characters become is left to NFC, which is shown keys of
the table alone: what SentencePiece composes is composed, nothing else, and nothing is reordered.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from tokenizers import Regex, normalizers

_MAX_KEYS = 2**20
_MAX_KEY_BYTES = 64
_CONTROL = "\x01"  # dropped by the usual tables, so it stays in no text
_UNASSIGNED = "\ufff8"  # for tables that keep control characters: no text holds it


@dataclass(frozen=True)
class Charsmap:
    """A table of characters: key, and what it becomes."""

    blob: bytes
    singles: Mapping[str, str]  # keys of one character
    several: Mapping[str, str]  # keys of more

    @cached_property
    def unfollowed(self) -> list[str]:
        """The keys of several characters that become anything but NFC of their characters."""
        return [
            key
            for key, value in self.several.items()
            if unicodedata.normalize("NFC", "".join(self.singles.get(c, c) for c in key)) != value
        ]

    @cached_property
    def steps(self) -> list[normalizers.Normalizer]:
        """Normalizers that do the same to a text, in order."""
        if not self.singles and not self.several:
            return []
        separator = _CONTROL if self.singles.get(_CONTROL) == "" else _UNASSIGNED
        steps: list[normalizers.Normalizer] = [
            normalizers.Replace(Regex(r"(?<=.)(?=[^\x00-\x7f])|(?<=\r)(?=\n)"), separator),
            normalizers.Precompiled(self.blob),
        ]
        if separator is _UNASSIGNED:
            steps.append(normalizers.Replace(separator, ""))
        if composed := [key for key in self.several if not any(c in self.singles for c in key)]:
            units = Branch.of(composed)
            # Behind every unit, and every other character that is not ASCII: \K forgets what it is.
            behind = rf"(?>(?=.{one_of(units.second())})(?:{units.pattern()})|[^\x00-\x7f])\K"
            steps += [
                normalizers.Replace(Regex(behind), separator),
                normalizers.NFC(),
                normalizers.Replace(separator, ""),
            ]
        return steps


@lru_cache(maxsize=2)  # most have none, or the same one, which takes two seconds
def read_charsmap(blob: bytes) -> Charsmap:
    """Return the table that a model holds as a double array; b"": none.

    Raises ValueError if it is damaged, or larger than any that is known.
    """
    keys = dict(_read_keys(blob)) if blob else {}
    return Charsmap(
        blob,
        {key: value for key, value in keys.items() if len(key) == 1},
        {key: value for key, value in keys.items() if len(key) > 1},
    )


def _read_keys(blob: bytes) -> Iterator[tuple[str, str]]:
    """Yield key and value of every entry of the double array (of the darts-clone library)."""
    size = struct.unpack_from("<I", blob)[0] if len(blob) >= 4 else 0
    if not 0 < size <= len(blob) - 4 or size % 4:
        raise ValueError("its table of characters is damaged")
    units = np.frombuffer(blob, "<u4", size // 4, offset=4)
    values = blob[4 + size :]
    children = _children(units)
    numbers = units.tolist()
    waiting, num_keys = [(_base(numbers[0], 0), b"")], 0
    while waiting:
        base, key = waiting.pop()
        for label, place in children.get(base, ()):
            unit = numbers[place]
            below = _base(unit, place)
            waiting.append((below, key + bytes([label])))
            if unit >> 8 & 1 and below < len(numbers):  # a value follows under the label 0
                start = numbers[below] & 0x7FFFFFFF
                end = values.find(b"\0", start)
                num_keys += 1
                if end < 0 or num_keys > _MAX_KEYS or len(key) >= _MAX_KEY_BYTES:
                    raise ValueError("its table of characters is damaged, or too large")
                yield (key + bytes([label])).decode(), values[start:end].decode()
        if len(key) > _MAX_KEY_BYTES or len(waiting) > _MAX_KEYS:
            raise ValueError("its table of characters is damaged, or too large")


def _base(unit: int, place: int) -> int:
    return place ^ (unit >> 10 << ((unit & 0x200) >> 6))


def _children(units: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """Return, by the base that they lie at, the labels and places of all units that have one."""
    labels = (units & 0x800000FF).astype(np.int64)
    places = np.flatnonzero((labels > 0) & (labels < 256))
    found: dict[int, list[tuple[int, int]]] = {}
    for place, label in zip(places.tolist(), labels[places].tolist(), strict=True):
        found.setdefault(place ^ label, []).append((label, place))
    return found


@dataclass(frozen=True)
class Branch:
    """The characters that may follow in a set of keys; those that go on alike stand together."""

    groups: frozenset[tuple[frozenset[str], Branch]]
    is_end: bool

    @classmethod
    def of(cls, keys: Iterable[str]) -> Branch:
        """Return the root of all keys."""
        rests: dict[str, list[str]] = {}
        is_end = False
        for key in keys:
            if key:
                rests.setdefault(key[0], []).append(key[1:])
            is_end = is_end or not key
        alike: dict[Branch, set[str]] = {}
        for char, rest in rests.items():
            alike.setdefault(cls.of(rest), set()).add(char)
        return cls(frozenset((frozenset(chars), branch) for branch, chars in alike.items()), is_end)

    def second(self) -> set[str]:
        """Return the characters that may come second."""
        return {c for _, branch in self.groups for chars, _ in branch.groups for c in chars}

    def pattern(self) -> str:
        """Return the regular expression of the longest key."""
        found = sorted(one_of(chars) + branch.pattern() for chars, branch in self.groups)
        if not found:
            return ""
        return f"(?:{'|'.join(found)}){'?' if self.is_end else ''}"


def one_of(chars: Iterable[str]) -> str:
    """Return the regular expression of one of these characters, neighbours as ranges."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, chars)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return f"[{''.join(f'{_escaped(low)}-{_escaped(high)}' for low, high in ranges)}]"


def literal(text: str) -> str:
    """Return the regular expression of a text."""
    return "".join(_escaped(ord(char)) for char in text)


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"
