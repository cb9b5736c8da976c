"""What commands that call a server share: its client, and texts from the standard input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from server.client import Client


@contextlib.contextmanager
def open_client(server: str) -> Iterator[Client]:
    """Open a client; what keeps it from calling ends the command with one line."""
    from server.client import Client, Unavailable

    try:
        with Client(server) as client:
            yield client
    except ValueError as error:  # what was typed cannot be sent at all
        raise click.ClickException(str(error)) from error
    except Unavailable as error:
        if error.reason:
            raise  # a server has answered
        raise click.ClickException(
            f"no server answers at {server}; start one with `tokenweir serve`, or give --server "
            f"({error.args[0]})"
        ) from error


def input_lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty."""
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
