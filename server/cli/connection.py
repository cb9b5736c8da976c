"""What commands that call a server share: its client, their inputs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from server.cli.exit_codes import DONE, FAILED, UNAVAILABLE, USAGE, CommandError
from server.cli.json_lines import print_json

if TYPE_CHECKING:
    from tokenweir import Client

T = TypeVar("T")


@contextlib.contextmanager
def open_client(server: str) -> Iterator[Client]:
    """Open a client; what keeps it from calling ends the command with one line."""
    from tokenweir import Client, Unavailable

    try:
        with Client(server) as client:
            yield client
    except ValueError as error:  # what was typed cannot be sent at all
        raise CommandError(str(error), USAGE) from error
    except Unavailable as error:
        if error.reason:
            raise  # a server has answered
        raise CommandError(
            f"no server answers at {server}; start one with `tokenweir serve`, or give --server "
            f"({error.args[0]})",
            UNAVAILABLE,
        ) from error


def answer_each(
    inputs: Sequence[T], answer: Callable[[T | str], None], *, as_json: bool = False
) -> int:
    """Answer every input, and every line of the standard input where one is "-" or none is given.

    One that the server refuses does not keep the others from their answers: it is named on the
    standard error, and something stands in its place. Return the exit code.
    """
    from tokenweir import InvalidArgument

    is_single = len(inputs) == 1 and inputs[0] != "-"
    code = DONE
    for number, one in enumerate(_lines(inputs), start=1):
        try:
            answer(one)
        except InvalidArgument as error:
            code = FAILED
            click.echo(f"error: {'' if is_single else f'input {number}: '}{error}", err=True)
            if as_json:
                print_json({"error": {"code": error.code.name, "message": str(error)}})
            elif not is_single:
                click.echo()
    return code


def _lines(inputs: Sequence[T]) -> Iterator[T | str]:
    for one in inputs or ("-",):
        if one == "-":
            yield from (line.rstrip("\n") for line in sys.stdin)
        else:
            yield one
