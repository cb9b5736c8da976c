"""The command that answers OpenAI's protocol over HTTP, in front of a server."""

from __future__ import annotations

from typing import Any

import click

from server.cli.extras import needs
from server.cli.front import check_reach, front_options, run_front
from server.cli.options import examples
from server.cli.server_options import Server, server_option


@click.command(
    "http",
    short_help="Answer OpenAI's protocol over HTTP, in front of a server.",
    epilog=examples(
        "tokenweir http --port 8000",
        "tokenweir http --server server.example:50051 --tls-ca ca.pem --port 8000",
    ),
)
@front_options(port=8000)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1),
    default=4 << 20,
    show_default=True,
    help="Of one request; a longer one is refused.",
)
@server_option
@needs("http")
def http(host: str, insecure: bool, server: Server, **settings: Any) -> None:
    """Answer OpenAI's protocol over HTTP: completions, conversations, embeddings, models.

    It is a client of the server at --server. The token of an HTTP request goes there with it; a
    request without one is sent with --token, if that is given.
    """
    from server.http.config import HttpConfig
    from server.http.serving import serve

    check_reach(host, insecure)
    config = HttpConfig(host=host, **settings)
    run_front(server, config, serve, "OpenAI's protocol at {}/v1")
