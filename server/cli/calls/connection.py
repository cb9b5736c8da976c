"""The client and the inputs of commands that call a server."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, TypeVar, cast

import click
from tokenweir import Client, InvalidArgument, Unavailable

from server.cli.calls.json_lines import print_json
from server.cli.calls.server_options import Server
from server.cli.exit_codes import DONE, FAILED, UNAVAILABLE, USAGE, CommandError

T = TypeVar("T")

_CHUNK = 1 << 16  # bytes
_NOT_UTF8 = "surrogateescape"  # keeps what is not UTF-8 in a text that nothing takes for one
LINES_TOGETHER = 32  # a worker decodes so many at once; a server takes 64 inputs in a call


@contextlib.contextmanager
def open_client(server: Server) -> Iterator[Client]:
    """Open a client; what keeps it from calling ends the command with one line."""
    try:
        with Client(server.address, **server.client_arguments) as client:
            yield client
    except ValueError as error:  # the typed values cannot be sent at all
        raise CommandError(str(error), USAGE) from error
    except Unavailable as error:
        if error.reason:
            raise  # a server has answered, or does not speak to us
        raise CommandError(
            f"no server answers at {server}; start one with `tokenweir serve`, or give --server, "
            # gRPC tells of one address of a name with several, at which nobody may listen.
            f"or what one with TLS asks for (--tls-ca, --tls-cert) ({error.args[0]})",
            UNAVAILABLE,
        ) from error


def answer_each(
    inputs: Sequence[T],
    answer: Callable[[T | str], None],
    *,
    answer_together: Callable[[Sequence[str]], bool] | None = None,
    as_json: bool = False,
) -> int:
    """Answer every input, and every line of the standard input where one is "-" or none is given.

    One that is refused, here or by the server, does not keep the others from their answers: it is
    named on the standard error, and something stands in its place. Lines that have arrived together
    are given to `answer_together`; where that returns False, having answered none, each is answered
    alone. Return the exit code.
    """
    is_single = len(inputs) == 1 and inputs[0] != "-"
    code, number = DONE, 0
    for group in _groups(inputs):
        if answer_together is not None and len(group) > 1 and answer_together(group):
            number += len(group)
            continue
        for one in group:
            number += 1
            if not _is_answered(one, answer, "" if is_single else f"input {number}: ", as_json):
                code = FAILED
    return code


def _is_answered(
    one: T | str, answer: Callable[[T | str], None], place: str, as_json: bool
) -> bool:
    try:
        _check_is_utf8(one)
        answer(one)
    except (InvalidArgument, ValueError, click.UsageError) as error:
        if not place and not isinstance(error, InvalidArgument):
            raise
        click.echo(f"error: {place}{error}", err=True)
        if as_json:
            print_json({"error": {"code": "INVALID_ARGUMENT", "message": str(error)}})
        elif place:
            click.echo()
        return False
    return True


def _check_is_utf8(one: object) -> None:
    """Raise ValueError for a text in which bytes stand that are not UTF-8."""
    try:
        str(one).encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) & 0xFF
        raise ValueError(
            f"byte 0x{byte:02x} behind {error.start} characters is not UTF-8; convert the text"
        ) from error


def _groups(inputs: Sequence[T]) -> Iterator[list[Any]]:
    """Yield the inputs one by one, and the lines of the standard input as they arrive."""
    for one in inputs or ("-",):
        if one == "-":
            yield from arriving_lines(LINES_TOGETHER)
        else:
            yield [one]


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
