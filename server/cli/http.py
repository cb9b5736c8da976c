"""The command that answers OpenAI's protocol over HTTP, in front of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from tokenweir import AsyncClient

from server.adapters.config import HttpConfig, http_config
from server.cli.adapter import Adapter
from server.cli.extras import needs
from server.cli.options import examples
from server.cli.server_options import Server, server_option
from server.cli.setting_options import given_settings, print_settings, setting_options

_ADMIN_SECONDS = 4.0


@click.command(
    "http",
    epilog=examples(
        "tokenweir http --port 8000",
        "tokenweir http --server server.example:50051 --tls-ca ca.pem --port 8000",
        "tokenweir http --config serve.toml",
    ),
)
@setting_options("http")
@click.option(
    "--admin",
    metavar="HOST:PORT",
    help="The server's admin port, for the page to show workers and load.",
)
@click.option(
    "--admin-token",
    envvar="TOKENWEIR_ADMIN_TOKEN",
    show_envvar=True,
    metavar="TOKEN",
    help="Token for the admin port; readers of the load on the page need it too.",
)
@server_option
@needs("http")
def http(
    admin: str | None,
    admin_token: str | None,
    server: Server,
    file: Path | None,
    print_config: bool,
    **typed: Any,
) -> None:
    """Answer OpenAI's protocol over HTTP: completions, conversations, embeddings, models; below /v2
    the Open Inference Protocol (KServe v2), without streams; and at / show a page with the server's
    health and load, and its models to try.

    It is a client of the server at --server. The token of an HTTP request goes there with it; a
    request without one is sent with --token, if that is given. The FILE may be that of the service:
    it listens on the same host, and `[http]` has its port and limits.
    """
    given = given_settings("http", file, typed)
    settings = given.settings()
    if print_config:
        return print_settings(given)
    config = http_config(settings, admin_token)
    operated = None if admin is None else replace(server, address=admin, token=admin_token)
    serve, said = partial(_serve, operated), "OpenAI's protocol at {}/v1"
    Adapter(server, settings, config, serve, said).run()


async def _serve(
    operated: Server | None,
    client: AsyncClient,
    config: HttpConfig,
    announce: Callable[[str], None],
) -> None:
    """Serve with the load of a server, where its admin port is known."""
    from server.adapters.http.serving import serve

    if operated is None:
        return await serve(client, config, announce)
    options = {**operated.client_arguments, "timeout": _ADMIN_SECONDS, "max_attempts": 1}
    async with AsyncClient(operated.address, **options) as admin:
        await serve(client, config, announce, admin)
