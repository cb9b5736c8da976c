"""Parts common to the commands that put a server of another protocol in front of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from tokenweir import AsyncClient

from server.adapters.config import AdapterConfig
from server.adapters.reach import check_reach
from server.cli.exit_codes import USAGE, CommandError
from server.cli.server_options import Server
from server.cli.service import say
from server.listening import check_ports_are_free
from server.settings import Settings
from server.signals import cancelled_by_signals
from server.telemetry.logs import log_to_stderr

ConfigT = TypeVar("ConfigT", bound="AdapterConfig")
Serve = Callable[["AsyncClient", ConfigT, Callable[[str], None]], Awaitable[None]]


@dataclass(frozen=True)
class Adapter(Generic[ConfigT]):
    """A server of another protocol, in front of one of ours."""

    server: Server  # the server behind
    settings: Settings
    config: ConfigT  # the part of them for this server
    serve: Serve[ConfigT]
    announcement: str  # has a place for the address

    def run(self) -> None:
        """Serve until a signal ends it, by uvloop where that is installed: it takes less."""
        loop = import_module("uvloop" if find_spec("uvloop") else "asyncio")
        loop.run(_run(self))


async def _run(adapter: Adapter[Any]) -> None:
    server, config = adapter.server, adapter.config
    log_to_stderr(adapter.settings.log)
    check_ports_are_free(("--port", config.host, config.port))

    def announce(address: str) -> None:
        said = adapter.announcement.format(address)
        say(f"serving {said}, for {server}; Ctrl-C stops", adapter.settings.log)

    # One attempt: clients are told when to come back.
    options = {**server.client_arguments, "timeout": config.timeout, "max_attempts": 1}
    try:
        async with AsyncClient(server.address, **options) as client:
            with cancelled_by_signals():
                if not adapter.settings.auth.insecure:
                    await check_reach(config, client, has_token=server.token is not None)
                await adapter.serve(client, config, announce)
    except ValueError as error:  # a token that cannot be sent
        raise CommandError(str(error), USAGE) from error
