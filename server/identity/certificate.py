"""The certificate of a port that Python's ssl serves, read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl

from engine.errors import ConfigError
from server.identity.config import DoorsConfig
from server.identity.files import stamp_of
from server.identity.tls import server_credentials

logger = logging.getLogger(__name__)

_PAUSE = 1.0  # seconds between two looks


class Certificate:
    """The certificate and its key, and the roots of those of clients.

    `context` is what a port is opened with. Each new connection gets another one, with what the
    files had when they were last read: a context forgets none of the roots that it has.
    """

    def __init__(self, config: DoorsConfig) -> None:
        """Raise ConfigError for files that cannot be used."""
        self._config = config
        self._paths = tuple(
            path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path
        )
        self._seen = stamp_of(self._paths)
        self._newest = self._read()
        self.context = self._read()
        self.context.sni_callback = self._present  # asked for every client, names one or not
        # A ticket would let a client in again whose certificate nobody trusts any more.
        self.context.num_tickets = 0
        self.context.options |= ssl.OP_NO_TICKET

    async def watch(self) -> None:
        """Let new connections meet what has changed in the files, until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Let new connections meet what has changed in the files; what cannot be used is logged."""
        stamp = stamp_of(self._paths)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._newest = self._read()
        except ConfigError as error:
            logger.error("%s; the certificate that was read before goes on", error)

    def _present(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._newest

    def _read(self) -> ssl.SSLContext:
        config = self._config
        server_credentials(config)  # refuses files that cannot be used
        assert config.tls_cert is not None, "there is a certificate"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
        if config.tls_client_ca is not None:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
