"""Reads JSON files that a stranger may have written: bounded in size, without a key twice."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the bytes of a file; ValueError if it has more of them, or is none.

    Nobody may ever write to a pipe.
    """
    if not Path(path).is_file():
        os.stat(path)  # whose error tells why there is nothing
        raise ValueError("it is not a file")
    with Path(path).open("rb") as file:
        return read_at_most(file, max_bytes)


def read_at_most(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the bytes of an open file; ValueError, and no more read, if it has more of them."""
    raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes are.

    Raises ValueError for anything else, for a key that an object has twice, which two readers
    could understand differently, and for values nested deeper than Python reads.
    """
    try:
        content = json.loads(raw.decode(), object_pairs_hook=_refuse_twice)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twice[:64]!a} twice")
    return found
