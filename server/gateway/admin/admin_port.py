"""The port of those who operate a server, with tokens of their own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from tokenweir.v1 import admin_service_pb2_grpc

from engine.errors import Unauthenticated
from server.api import ADMIN, HEALTH
from server.auth.tls import server_credentials
from server.auth.tokens import TokenFile
from server.calls.call_server import CallServer, ServerCall
from server.calls.deadlines import CLOSE_TIMEOUT
from server.calls.health import Health
from server.calls.reflection import enable_reflection
from server.calls.request_ids import made_request_id
from server.calls.status import call_status
from server.config import GatewayConfig
from server.gateway.admin.admin_service import AdminService
from server.gateway.request_reader import READ_TIMEOUT
from server.listening import listen, server_options
from server.local_services import LocalServices

logger = logging.getLogger(__name__)

_MOST = 32  # connections
_HEALTH = f"/{HEALTH}/"
# Methods that change nothing: a page that shows the load would fill the log.
_ASKED_OFTEN = frozenset(f"/{ADMIN}/{name}" for name in ("GetLoad", "GetServerInfo", "ListModels"))


def admin_socket(socket: Path) -> Path:
    """Return where the admin port is beside a local socket of the gateway."""
    return socket.with_suffix(".admin")


class AdminPort:
    """Answers the AdminService, to callers with an operator's token if one is asked for."""

    def __init__(self, config: GatewayConfig, service: AdminService, health: Health) -> None:
        """Raise ConfigError if the file of tokens cannot be used."""
        self._config = config
        self._tokens = None if config.admin.tokens is None else TokenFile(config.admin.tokens)
        self._services = LocalServices(config.max_request_bytes, READ_TIMEOUT)
        server = cast(aio.Server, self._services)  # it has what is asked of one here
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        if config.reflection:
            enable_reflection((ADMIN, HEALTH), self._services)

    def start(self, port: int | None) -> int | None:
        """Listen; return the port, None for a local socket alone.

        Raises ConfigError if nobody can listen there.
        """
        config, self._loop = self._config, asyncio.get_running_loop()
        credentials = server_credentials(config.tls)
        options = server_options(config.max_request_bytes, config.client_keepalive_timeout, _MOST)
        self._server = CallServer(self._arrived, options)
        bound = None if port is None else listen(self._server, config.host, port, credentials)
        if config.local_socket is not None:
            listen(self._server, f"unix:{admin_socket(config.local_socket)}", 0)
        self._server.start()
        return bound

    async def close(self) -> None:
        """Take no more calls."""
        await self._server.stop(CLOSE_TIMEOUT)

    def _arrived(self, call: ServerCall) -> None:
        """In the thread of the server; health is told to everybody."""
        if not call.method.startswith(_HEALTH):
            try:
                if self._tokens is None:
                    who = call.peer().decode()
                else:
                    who = self._tokens.identity(call.invocation_metadata()).tenant
            except Unauthenticated as error:
                call.refuse(call_status(error, made_request_id()))
                return
            level = logging.DEBUG if call.method in _ASKED_OFTEN else logging.INFO
            logger.log(level, "%s, asked by %s", call.method, who)
        self._loop.call_soon_threadsafe(lambda: call.answer(self._services.answer(call)))
