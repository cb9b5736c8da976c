"""The certificate of a server, read again when its files change."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import Any, cast

import grpc

from engine.errors import ConfigError
from server.identity.config import DoorsConfig
from server.identity.files import stamp_of

logger = logging.getLogger(__name__)


def server_credentials(config: DoorsConfig) -> grpc.ServerCredentials | None:
    """Return the credentials of one port; None if calls are not encrypted.

    Whoever connects after a change of the files meets the new ones; connections that are there
    stay as they are. Raises ConfigError if the files cannot be used; a change to such files is
    logged, and the ones before go on.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate = _Certificate(config.tls_cert, config.tls_key, config.tls_client_ca)
    return grpc.dynamic_ssl_server_credentials(
        certificate.read(),
        cast(Any, certificate.changed),  # the stubs know no None
        require_client_authentication=config.tls_client_ca is not None,
    )


class _Certificate:
    """A certificate, its key, and the roots of those of clients, in files."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._paths = (cert, key) if client_ca is None else (cert, key, client_ca)
        self._lock = threading.Lock()
        self._seen = stamp_of(self._paths)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what is in the files now; None if that is known, or cannot be used.

        gRPC asks before every handshake, in its own threads.
        """
        with self._lock:
            stamp = stamp_of(self._paths)
            if stamp == self._seen:
                return None
            self._seen = stamp
        try:
            found = self.read()
        except ConfigError as error:
            logger.error("%s; the certificate that was read before goes on", error)
            return None
        logger.info("%s has changed: new connections meet the new certificate", self._cert)
        return found

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Return what is in the files; ConfigError if no server can use it."""
        try:
            self._check()
            pair = self._key.read_bytes(), self._cert.read_bytes()
            roots = None if self._client_ca is None else self._client_ca.read_bytes()
        except (OSError, ValueError) as error:  # ssl's errors are among them
            files = " and ".join(map(str, self._paths))
            raise ConfigError(
                f"TLS cannot use {files}: {error}; give a certificate and its key, without a "
                "password, as PEM"
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def _check(self) -> None:
        """Have OpenSSL look at the files: gRPC says of a wrong one only that it is wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._cert, self._key, password="")
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
