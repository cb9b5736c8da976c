"""The lines of the standard input, as many at a time as are there already."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from typing import TextIO, cast

import click

_CHUNK = 1 << 16  # bytes
_NOT_UTF8 = "surrogateescape"  # keeps what is not UTF-8 in a text that nothing takes for one


def arriving_lines(most: int) -> Iterator[list[str]]:
    """Yield the lines of the standard input, UTF-8 in every locale, up to `most` at a time.

    The lines of a file come together; those of a pipe or a person each when it is there, so that
    nobody has to write another line before the answer to one. Bytes that are not UTF-8 are halves
    of surrogate pairs.
    """
    rest, mark = b"", codecs.BOM_UTF8
    for chunk in _chunks():
        *lines, rest = (rest + chunk).removeprefix(mark).split(b"\n")
        mark = mark if not lines else b""
        for start in range(0, len(lines), most):
            yield [_text(line) for line in lines[start : start + most]]
    if rest := rest.removeprefix(mark):
        yield [_text(rest)]


def _chunks() -> Iterator[bytes]:
    """Yield what is there."""
    stdin: TextIO | None = sys.stdin
    if stdin is None:
        raise click.UsageError("the standard input is closed; give the texts as arguments")
    if not isinstance(stdin, io.TextIOWrapper):  # a text of a caller in this process
        yield stdin.read().encode(errors=_NOT_UTF8)
        return
    buffer = cast(io.BufferedReader, stdin.buffer)
    while chunk := buffer.read1(_CHUNK):
        yield chunk


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors=_NOT_UTF8)
