"""Parts common to the commands that put a server of another protocol in front of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from server.cli.exit_codes import USAGE, CommandError
from server.cli.given_settings import config_option, print_config_option
from server.cli.options import Decorator, Number, existing_file
from server.cli.server_options import Server
from server.cli.service import say
from server.cli.sight_options import LOG_OPTIONS

if TYPE_CHECKING:
    from tokenweir import AsyncClient

    from server.config import LogConfig
    from server.front_config import FrontConfig
    from server.settings import Settings

ConfigT = TypeVar("ConfigT", bound="FrontConfig")
Serve = Callable[["AsyncClient", ConfigT, Callable[[str], None]], Awaitable[None]]


_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on."),
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
        help="Let other machines call without certificates or tokens (see --host).",
    ),
    click.option(
        "--listen-tls-cert",
        type=existing_file,
        metavar="PEM",
        help="Take calls by TLS only, with this certificate; a renewed file is read by itself.",
    ),
    click.option(
        "--listen-tls-key",
        type=existing_file,
        metavar="PEM",
        help="Key of the certificate.",
    ),
    click.option(
        "--listen-tls-client-ca",
        type=existing_file,
        metavar="PEM",
        help="Take clients only that show a certificate which one of these has signed.",
    ),
)
_OF_ALL = (*LOG_OPTIONS, config_option, print_config_option)


def front_options(port: int) -> Decorator:
    """Give a command the options of such a server, which listens on `port` unless told."""
    of_port = click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=port,
        show_default=True,
        help="Port to listen on; 0: any free one.",
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        host, *rest = _OPTIONS
        wrapped = command
        for option in reversed((host, of_port, *rest, *_OF_ALL)):
            wrapped = option(wrapped)
        return wrapped

    return decorate


@dataclass(frozen=True)
class Front(Generic[ConfigT]):
    """A server to put in front of another."""

    server: Server  # that one
    settings: Settings
    config: ConfigT  # the part of them for this server
    serve: Serve[ConfigT]
    announcement: str  # with a place for the address

    @property
    def log(self) -> LogConfig:
        """The settings of its log."""
        return self.settings.log()

    def run(self) -> None:
        """Serve until a signal ends it, by uvloop where that is installed: it takes less."""
        loop = import_module("uvloop" if find_spec("uvloop") else "asyncio")
        loop.run(_run(self))


async def _run(front: Front[Any]) -> None:
    import asyncio

    from tokenweir import AsyncClient

    from server.front.reach import check_reach
    from server.listening import check_ports_are_free
    from server.signals import cancelled_by_signals
    from server.telemetry.logs import log_to_stderr

    server, config = front.server, front.config
    log_to_stderr(front.log)
    check_ports_are_free(("--port", config.host, config.port))

    def announce(address: str) -> None:
        said = front.announcement.format(address)
        say(f"serving {said}, for {server}; Ctrl-C stops", front.log)

    # One attempt: clients are told when to come back.
    options = {**server.client_arguments, "timeout": config.timeout, "max_attempts": 1}
    try:
        async with AsyncClient(server.address, **options) as client:
            with cancelled_by_signals() as seen:
                try:
                    if not front.settings["gateway.doors.insecure"].value:
                        await check_reach(config, client, has_token=server.token is not None)
                    await front.serve(client, config, announce)
                except asyncio.CancelledError:
                    if not seen:
                        raise
    except ValueError as error:  # a token that cannot be sent
        raise CommandError(str(error), USAGE) from error
