"""Whether a Ray of our own is run, or a cluster is joined."""

from __future__ import annotations

import os
import socket

from engine.errors import ConfigError

_TIMEOUT = 10.0  # seconds until a host has answered


def joins_cluster() -> bool:
    """Return whether the environment names a cluster to join."""
    return bool(os.environ.get("RAY_ADDRESS"))


def check_gateways_find(*, has_gateway: bool) -> None:
    """Raise ConfigError for workers that no gateway finds."""
    if not (has_gateway or joins_cluster()):
        raise ConfigError(
            "listen.gateway (false) leaves workers that no gateway finds: only on the "
            "Ray cluster at RAY_ADDRESS `tokenweir gateway` finds them"
        )


def not_joined(address: str, error: Exception) -> str:
    """Return what to do about a cluster that does not answer; Ray names no token in its error."""
    return (
        f"the Ray cluster at {address} does not answer: {error}; see whether it runs there, and if "
        "it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as it has them"
    )


def connect_once(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT; Ray would try again for minutes.

    Other forms, as "auto", are Ray's to look up.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT).close()
