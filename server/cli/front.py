"""What the commands have in common that put a server of another protocol in front of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from server.cli.exit_codes import NOT_USABLE, USAGE, CommandError
from server.cli.options import Decorator, Number
from server.cli.server_options import Server

if TYPE_CHECKING:
    from tokenweir import AsyncClient

    from server.front.config import FrontConfig

ConfigT = TypeVar("ConfigT", bound="FrontConfig")
Serve = Callable[["AsyncClient", ConfigT, Callable[[str], None]], Awaitable[None]]


def front_options(port: int) -> Decorator:
    """Give a command the options of such a server, which listens on `port` unless told."""
    options = (
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Interface to listen on."
        ),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=port,
            show_default=True,
            help="Port to listen on; 0: any free one.",
        ),
        click.option(
            "--timeout",
            type=Number(min=0, min_open=True),
            default=600.0,
            show_default=True,
            metavar="SECONDS",
            help="Deadline of a request, waiting included.",
        ),
        click.option(
            "--grace",
            type=Number(min=0),
            default=30.0,
            show_default=True,
            metavar="SECONDS",
            help="Open requests at SIGTERM or Ctrl-C get this long to finish.",
        ),
        click.option(
            "--insecure",
            is_flag=True,
            help="Let other machines call, unencrypted (see --host).",
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def check_reach(host: str, insecure: bool) -> None:
    """Raise CommandError if other machines could call, and nobody has said that they may."""
    from server.identity.config import is_loopback

    if not (insecure or is_loopback(host)):
        raise CommandError(
            f"host ({host}) is reached from other machines, and calls are not encrypted here; "
            "listen on 127.0.0.1 behind a proxy that has TLS, or type --insecure",
            NOT_USABLE,
        )


def run_front(server: Server, config: ConfigT, serve: Serve[ConfigT], announcement: str) -> None:
    """Serve in front of a server until a signal; `announcement` has a place for the address."""
    import asyncio

    asyncio.run(_run(server, config, serve, announcement))


async def _run(server: Server, config: ConfigT, serve: Serve[ConfigT], announcement: str) -> None:
    import asyncio
    import logging

    from tokenweir import AsyncClient

    from server.signals import cancelled_by_signals

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.ERROR)

    def announce(address: str) -> None:
        said = announcement.format(address)
        click.echo(f"serving {said}, for {server}; Ctrl-C stops", err=True)

    # One attempt: clients are told when to come back.
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
