"""The server that a command calls: its address, certificates, and the caller's token."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc

from server.cli.exit_codes import NOT_USABLE, CommandError
from server.cli.options import Decorator, existing_file


@dataclass(frozen=True)
class Server:
    """A server to call, as it was typed."""

    address: str
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.address

    @property
    def client_arguments(self) -> dict[str, Any]:
        """The client's arguments besides the address; CommandError for unusable files."""
        if self.tls_ca is None:
            return {"credentials": None, "token": self.token}
        try:
            # First by OpenSSL: for a wrong file gRPC says only that nobody answers.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            roots, key, cert = (
                None if path is None else path.read_bytes()
                for path in (self.tls_ca, self.tls_key, self.tls_cert)
            )
        except (OSError, ValueError) as error:  # ssl's errors are among them
            files = ", ".join(map(str, filter(None, (self.tls_ca, self.tls_cert, self.tls_key))))
            raise CommandError(f"TLS cannot use {files}: {error}", NOT_USABLE) from error

        credentials = grpc.ssl_channel_credentials(roots, key, cert)
        return {"credentials": credentials, "token": self.token}


_NAMES = ("tls_ca", "tls_cert", "tls_key", "token")
_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--server",
        default="127.0.0.1:50051",
        show_default=True,
        envvar="TOKENWEIR_SERVER",
        show_envvar=True,
        metavar="HOST:PORT",
        help="The server to call.",
    ),
    click.option(
        "--token",
        envvar="TOKENWEIR_TOKEN",
        show_envvar=True,
        metavar="TOKEN",
        help="Bearer token; prefer the variable, as others on this machine see what is typed.",
    ),
    click.option(
        "--tls-ca",
        type=existing_file,
        envvar="TOKENWEIR_TLS_CA",
        show_envvar=True,
        metavar="PEM",
        help="Call by TLS; the server's certificate must be signed by one of these.",
    ),
    click.option("--tls-cert", type=existing_file, metavar="PEM", help="Client certificate."),
    click.option("--tls-key", type=existing_file, metavar="PEM", help="Key of --tls-cert."),
)


def server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a server to call, as one argument `server`."""

    @functools.wraps(command)
    def with_server(*args: Any, server: str, **typed: Any) -> Any:
        far_end = Server(server, **{name: typed.pop(name) for name in _NAMES})
        if (far_end.tls_cert is None) != (far_end.tls_key is None):
            raise click.UsageError("give --tls-cert and --tls-key, or none of them")
        if far_end.tls_cert is not None and far_end.tls_ca is None:
            raise click.UsageError("--tls-cert is for a call by TLS; give --tls-ca too")
        return command(*args, server=far_end, **typed)

    wrapped: Callable[..., Any] = with_server
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped
