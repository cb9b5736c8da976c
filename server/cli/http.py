"""The command that answers OpenAI's protocol over HTTP, in front of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from server.cli.exit_codes import NOT_USABLE, USAGE, CommandError
from server.cli.extras import needs
from server.cli.options import Number, examples
from server.cli.server_options import Server, server_option

if TYPE_CHECKING:
    from server.http.config import HttpConfig


@click.command(
    "http",
    short_help="Answer OpenAI's protocol over HTTP, in front of a server.",
    epilog=examples(
        "tokenweir http --port 8000",
        "tokenweir http --server server.example:50051 --tls-ca ca.pem --port 8000",
    ),
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port of the HTTP server; 0: any free one.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1),
    default=4 << 20,
    show_default=True,
    help="Of one request; a longer one is refused.",
)
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of a request, waiting included.",
)
@click.option(
    "--grace",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Open requests at SIGTERM or Ctrl-C get this long to finish.",
)
@click.option("--insecure", is_flag=True, help="Let other machines call, unencrypted (see --host).")
@server_option
@needs("http")
def http(
    host: str,
    port: int,
    max_body_bytes: int,
    timeout: float,
    grace: float,
    insecure: bool,
    server: Server,
) -> None:
    """Answer OpenAI's protocol over HTTP: completions, conversations, embeddings, models.

    It is a client of the server at --server. The token of an HTTP request goes there with it; a
    request without one is sent with --token, if that is given.
    """
    import asyncio

    from server.http.config import HttpConfig
    from server.identity.config import is_loopback

    if not (insecure or is_loopback(host)):
        raise CommandError(
            f"host ({host}) is reached from other machines, and HTTP is not encrypted here; listen "
            "on 127.0.0.1 behind a proxy that has TLS, or type --insecure",
            NOT_USABLE,
        )
    config = HttpConfig(
        host=host, port=port, max_body_bytes=max_body_bytes, timeout=timeout, grace=grace
    )
    asyncio.run(_serve(server, config))


async def _serve(server: Server, config: HttpConfig) -> None:
    import asyncio
    import logging

    from tokenweir import AsyncClient

    from server.http.serving import serve
    from server.signals import cancelled_by_signals

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.ERROR)

    def announce(url: str) -> None:
        click.echo(f"serving OpenAI's protocol at {url}/v1, for {server}; Ctrl-C stops", err=True)

    # One attempt: clients of HTTP are told when to come back.
    options = {**server.client_arguments, "timeout": config.timeout, "max_attempts": 1}
    try:
        async with AsyncClient(server.address, **options) as client:
            with cancelled_by_signals() as seen:
                try:
                    await serve(client, config, announce)
                except asyncio.CancelledError:
                    if not seen:
                        raise
    except ValueError as error:  # a token that cannot be sent
        raise CommandError(str(error), USAGE) from error
    except OSError as error:
        place = f"{config.host}:{config.port}"
        message = f"cannot listen on {place}: {error.strerror}; choose another port"
        raise CommandError(message, NOT_USABLE) from error
