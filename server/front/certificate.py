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
    """The certificate and its key, and the roots of those of clients."""

    def __init__(self, config: DoorsConfig) -> None:
        """Raise ConfigError for files that cannot be used."""
        self._config = config
        self._paths = tuple(
            path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path
        )
        self._seen = stamp_of(self._paths)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load()

    async def watch(self) -> None:
        """Let new connections meet what has changed in the files, until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE)
            stamp = stamp_of(self._paths)
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                await asyncio.to_thread(self._load)
            except ConfigError as error:
                logger.error("%s; the certificate that was read before goes on", error)

    def _load(self) -> None:
        server_credentials(self._config)  # what cannot be used does not reach the context
        config = self._config
        assert config.tls_cert is not None, "there is a certificate"
        self.context.load_cert_chain(config.tls_cert, config.tls_key, password="")
        if config.tls_client_ca is not None:
            self.context.load_verify_locations(config.tls_client_ca)
            self.context.verify_mode = ssl.CERT_REQUIRED
