"""The certificate of a port, read again when its files change, for gRPC and for Python's ssl."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc

from engine.errors import ConfigError
from server.auth.files import WatchedFiles
from server.settings import Tls


def server_credentials(tls: Tls) -> grpc.ServerCredentials | None:
    """Return the credentials of one port of gRPC; None if calls are not encrypted.

    New connections get changed files; open ones stay as they are. Raises ConfigError if the files
    cannot be used; a change to such files is logged, and the ones before go on.
    """
    if tls.cert is None:
        return None
    files = WatchedFiles(_paths(tls), partial(_configuration, tls))
    return grpc.dynamic_ssl_server_credentials(
        files.content(),
        cast(Any, files.changed),  # before every handshake; the stubs know no None
        require_client_authentication=tls.client_ca is not None,
    )


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return what a port of Python's ssl is opened with; as `server_credentials`.

    Each new connection gets another one, with the files as they are: a context forgets none of the
    roots that it has.
    """
    files = WatchedFiles(_paths(tls), partial(_context, tls))

    def present(
        connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = files.content()

    context = _context(tls)
    context.sni_callback = present  # asked for every client, names one or not
    # A ticket would let a client in again whose certificate nobody trusts any more.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


def _paths(tls: Tls) -> list[Path]:
    return [path for path in (tls.cert, tls.key, tls.client_ca) if path]


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    _context(tls)  # gRPC says of a wrong file only that it is wrong
    try:
        *pair, roots = (
            None if path is None else path.read_bytes()
            for path in (tls.key, tls.cert, tls.client_ca)
        )
    except OSError as error:
        raise _unusable(tls, error) from error
    return grpc.ssl_server_certificate_configuration([cast(Any, tuple(pair))], roots)


def _context(tls: Tls) -> ssl.SSLContext:
    """Return a context with the files; ConfigError if no server can use them."""
    assert tls.cert is not None, "there is a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl's errors are among them
        raise _unusable(tls, error) from error
    return context


def _unusable(tls: Tls, error: Exception) -> ConfigError:
    files = " and ".join(map(str, _paths(tls)))
    return ConfigError(
        f"TLS cannot use {files}: {error}; give a certificate and its key, without a password, as "
        "PEM"
    )
