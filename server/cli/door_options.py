"""Options of access to a server: authentication, and ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from server.cli.options import Decorator, existing_file
from server.identity.config import CERTIFICATES

_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--tls-cert",
        type=existing_file,
        metavar="PEM",
        help="Take calls by TLS only, with this certificate; a renewed file is read by itself.",
    ),
    click.option("--tls-key", type=existing_file, metavar="PEM", help="Key of the certificate."),
    click.option(
        "--tls-client-ca",
        type=existing_file,
        metavar="PEM",
        help="Take clients only that show a certificate which one of these has signed.",
    ),
    click.option(
        "--tokens",
        type=existing_file,
        metavar="TOML",
        help="Take calls only with a token of this file; `tokenweir token` makes one.",
    ),
    click.option(
        "--admin-port",
        type=click.IntRange(0, 65535),
        help="Port of those who operate the server; 0: any free one.  [default: none]",
    ),
    click.option(
        "--admin-tokens",
        type=existing_file,
        metavar="TOML",
        help="Take calls at the admin port only with a token of this file.",
    ),
    click.option("--reflection", is_flag=True, help="Describe the services to who asks for it."),
    click.option(
        "--insecure",
        is_flag=True,
        help="Let other machines call without certificates or tokens (see --host).",
    ),
)
DOOR_OPTIONS = (  # by the names of their settings
    *CERTIFICATES,
    *("tokens", "admin_port", "admin_tokens", "reflection", "insecure"),
)


def door_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
