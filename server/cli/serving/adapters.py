"""The commands that put a server of another protocol in front of ours: http, kserve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

import click
from tokenweir import AsyncClient

from server.adapters.config import HttpConfig, KserveConfig, http_config, kserve_config
from server.adapters.reach import check_reach
from server.cli.calls.server_options import Server, server_option
from server.cli.exit_codes import USAGE, CommandError
from server.cli.extras import needs
from server.cli.options import examples
from server.cli.serving.service import say
from server.cli.serving.setting_options import setting_options, settings_of
from server.given_settings import GivenSettings
from server.listening import check_ports_are_free
from server.settings import Settings
from server.signals import cancelled_by_signals
from server.telemetry.logs import log_to_stderr

ConfigT = TypeVar("ConfigT", HttpConfig, KserveConfig)
Serve = Callable[[AsyncClient, ConfigT, Callable[[str], None]], Awaitable[None]]

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
def http(admin: str | None, admin_token: str | None, server: Server, given: GivenSettings) -> None:
    """Answer OpenAI's protocol over HTTP: completions, conversations, embeddings, models; below /v2
    the Open Inference Protocol (KServe v2), without streams; and at / show a page with the server's
    health and load, and its models to try.

    It is a client of the server at --server. The token of an HTTP request goes there with it; a
    request without one is sent with --token, if that is given. The FILE may be that of the service:
    it listens on the same host, and `[http]` has its port and limits.
    """
    settings = settings_of(given)
    operated = None if admin is None else replace(server, address=admin, token=admin_token)
    serve, said = partial(_serve_http, operated), "OpenAI's protocol at {}/v1"
    serve_adapter(server, settings, http_config(settings, admin_token), serve, said)


async def _serve_http(
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


@click.command(
    "kserve",
    epilog=examples(
        "tokenweir kserve --port 8001",
        "tokenweir kserve --server server.example:50051 --tls-ca ca.pem --port 8001",
        "tokenweir kserve --config serve.toml",
    ),
)
@setting_options("kserve")
@server_option
def kserve(server: Server, given: GivenSettings) -> None:
    """Answer the Open Inference Protocol (KServe v2) over gRPC: generations, also as streams,
    classes, labels, vectors. Over HTTP it is answered by `tokenweir http`.

    It is a client of the server at --server. The bearer token of a call goes there with it; a call
    without one is sent with --token, if that is given. The FILE may be that of the service: it
    listens on the same host, and `[kserve]` has its port and limits.
    """
    from server.adapters.kserve.serving import serve

    settings = settings_of(given)
    said = "the Open Inference Protocol at {}"
    serve_adapter(server, settings, kserve_config(settings), serve, said)


def serve_adapter(
    server: Server, settings: Settings, config: ConfigT, serve: Serve[ConfigT], said: str
) -> None:
    """Serve until a signal ends it, by uvloop where that is installed: it takes less."""
    log_to_stderr(settings.log)
    check_ports_are_free(("--port", config.host, config.port))

    def announce(address: str) -> None:
        say(f"serving {said.format(address)}, for {server}; Ctrl-C stops", settings.log)

    async def run() -> None:
        # One attempt: clients are told when to come back.
        options = {**server.client_arguments, "timeout": config.timeout, "max_attempts": 1}
        async with AsyncClient(server.address, **options) as client:
            with cancelled_by_signals():
                if not settings.auth.insecure:
                    await check_reach(config, client, has_token=server.token is not None)
                await serve(client, config, announce)

    try:
        import_module("uvloop" if find_spec("uvloop") else "asyncio").run(run())
    except ValueError as error:  # a token that cannot be sent
        raise CommandError(str(error), USAGE) from error
