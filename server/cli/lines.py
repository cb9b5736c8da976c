"""The lines of the standard input, as many at a time as are there already."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from typing import cast

_CHUNK = 1 << 16  # bytes


def arriving_lines(most: int) -> Iterator[list[str]]:
    """Yield the lines of the standard input, up to `most` at a time.

    Of a file they come together; of a pipe or a person each when it is there, and nobody who waits
    for the answer to a line has to write another one first.
    """
    rest = ""
    for text in _texts():
        *lines, rest = (rest + text).split("\n")
        for start in range(0, len(lines), most):
            yield lines[start : start + most]
    if rest:
        yield [rest]


def _texts() -> Iterator[str]:
    """Yield what is there, with "\n" for every line end."""
    stdin = sys.stdin
    if not isinstance(stdin, io.TextIOWrapper):  # a text of a caller in this process
        yield stdin.read()
        return
    decode = codecs.getincrementaldecoder(stdin.encoding)(stdin.errors or "strict")
    reader = io.IncrementalNewlineDecoder(decode, translate=True)
    buffer = cast(io.BufferedReader, stdin.buffer)
    while chunk := buffer.read1(_CHUNK):
        yield reader.decode(chunk)
    yield reader.decode(b"", final=True)
