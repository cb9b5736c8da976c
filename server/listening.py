"""How every server here listens: its port, and the gRPC options of its connections."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import Protocol

import grpc
from tokenweir.keepalive import keepalive_options

from engine.errors import ConfigError
from server.hosts import addresses_of, family_of

_MAX_UNACCEPTED = 1 << 20  # calls that nobody has looked at; they have a few KiB each
_MOST_BEYOND = 16 << 20  # bytes
_OWN_FILES = 160  # open files of a process, for all but the clients of one port
_MOST_FILES = 1 << 20  # if there is no limit


def max_message_bytes(max_request_bytes: int) -> int:
    """Return what gRPC takes: its refusal has no details, so up to here the worker says it."""
    return max_request_bytes + min(3 * max_request_bytes, _MOST_BEYOND)


def max_connections(host: str) -> int:
    """Return how many connections each address of a host may have, so that files are left.

    A process without free files could not reach its workers and Ray.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = _MOST_FILES
    most = max(files - max(_OWN_FILES, files // 8), files // 4)
    return max(1, most // max(1, len(addresses_of(host))))


def connection_options(most: int) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options of so many connections at most, from which clients are heard soon."""
    return (
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", 5_000),  # TLS too
    )


def server_options(
    max_request_bytes: int, client_keepalive_timeout: float, most: int
) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options of every server here, for so many connections.

    The other two are settings of GatewayConfig.
    """
    return (
        *connection_options(most),
        # gRPC cancels calls without a word where it believes that too many wait to be accepted.
        ("grpc.server.max_pending_requests", _MAX_UNACCEPTED),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNACCEPTED),
        ("grpc.so_reuseport", 0),  # else a second server on the port takes half of the calls
        ("grpc.max_receive_message_length", max_message_bytes(max_request_bytes)),
        # Gateways and clients notice by pings that a host is gone; by default that is abuse.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        *keepalive_options(client_keepalive_timeout, client_keepalive_timeout),
    )


class _Listening(Protocol):
    def add_insecure_port(self, address: str, /) -> int: ...

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials, /) -> int: ...


def listen(
    server: _Listening, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Bind a server, return its port; ConfigError if it cannot be had.

    `credentials` make it take encrypted connections only.
    """
    try:
        if credentials is not None:
            return server.add_secure_port(address_of(host, port), credentials)
        return server.add_insecure_port(address_of(host, port))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address_of(host, port)}: it is in use, or not allowed to this "
            "user; stop what uses it, or choose another port (0: any that is free)"
        ) from error


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, for a server that is given one."""
    return socket.create_server((host, port), family=family_of(host), backlog=1024)


def check_ports_are_free(*wanted: tuple[str, str, int]) -> None:
    """Raise ConfigError if nobody can listen there, or two want the same port.

    Each is an option, a host and a port. Later failures cost time, and have gRPC's own words.
    """
    with contextlib.ExitStack() as stack:
        for option, host, port in wanted:
            probe = stack.enter_context(socket.socket(family_of(host), socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", "not the name of a host")
                way_out = "listen on an address of this machine, such as 127.0.0.1"
                if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
                    way_out = "stop what uses the port, or choose another with "
                    way_out += f"{option} (0: any that is free)"
                raise ConfigError(
                    f"cannot listen on {address_of(host, port)}: {reason}; {way_out}"
                ) from error


def socket_directory() -> Path:
    """Return where directories with Unix sockets are made: paths there must be short."""
    return Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())


def address_of(host: str, port: int) -> str:
    """Return "host:port" as gRPC reads it, also for the numbers of IPv6; "unix:PATH" as it is."""
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
