"""The client's channels: to which end, with which retry, limits and keepalive."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from tokenweir.keepalive import keepalive_options

Metadata = Sequence[tuple[str, str | bytes]]
ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)

CLOSED = "the client is closed; make another one"

_MAX_ATTEMPTS = 5  # gRPC silently lowers a greater number
_LAST_PORT = 65_535
_MAX_ANSWER_BYTES = 64 * 2**20
_PING_PAUSE, _PING_PATIENCE = 60.0, 20.0  # seconds


@dataclass(frozen=True)
class Server:
    """A server at an address, and how it is called."""

    address: str
    credentials: grpc.ChannelCredentials | None
    options: Sequence[tuple[str, str | int]]

    def channel(self) -> grpc.Channel:
        """Return a new channel to it."""
        if self.credentials is None:
            return grpc.insecure_channel(self.address, self.options)
        return grpc.secure_channel(self.address, self.credentials, self.options)

    def async_channel(self) -> grpc.aio.Channel:
        """Return a new channel to it, of the event loop that runs."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, self.options)
        return grpc.aio.secure_channel(self.address, self.credentials, self.options)


def call_metadata(metadata: Metadata, token: str | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return what goes with every call; ValueError for a token that no header can carry."""
    if token is None:
        return tuple(metadata)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token is printable ASCII without spaces, and not empty")
    return (*metadata, ("authorization", f"Bearer {token}"))


def far_end(
    address: str | None,
    channel: ChannelT | None,
    credentials: grpc.ChannelCredentials | None,
    max_attempts: int,
) -> ChannelT | Server:
    """Return the channel that is given, or else the server at the address.

    Raises ValueError unless one of the two is given, for a port that cannot be, and for credentials
    of a channel.
    """
    if channel is not None:
        if address is not None or credentials is not None:
            raise ValueError("a channel has its address and credentials; give it alone")
        return channel
    if address is None:
        raise ValueError('give an address, as "127.0.0.1:50051", or a channel')
    _check_port(address)
    return Server(address, credentials, channel_options(address, max_attempts))


def channel_options(address: str, max_attempts: int) -> list[tuple[str, str | int]]:
    """Return the options of a channel; how many retries are made is its service config's."""
    if not 1 <= max_attempts <= _MAX_ATTEMPTS:
        raise ValueError(f"max_attempts ({max_attempts}) must be 1, no retry, to {_MAX_ATTEMPTS}")
    return [
        ("grpc.service_config", json.dumps(_service_config(max_attempts))),
        ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.max_metadata_size", 64 * 2**10),  # details of an error travel in metadata
        # Only while a call runs: notices a peer that is gone without a word.
        *keepalive_options(_PING_PAUSE, _PING_PATIENCE),
        # gRPC obeys http_proxy even for this machine, which no proxy can reach.
        ("grpc.enable_http_proxy", 0 if _is_loopback(address) else 1),
    ]


def _service_config(max_attempts: int) -> dict[str, object]:
    """Return what is done with calls: each goes to the next of the addresses that a name has."""
    balanced: dict[str, object] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if max_attempts == 1:
        return balanced
    policy = {
        "maxAttempts": max_attempts,
        "initialBackoff": "0.1s",
        "backoffMultiplier": 2,
        "maxBackoff": "2s",
        # The last is what gRPC says of a call that came in the moment in which its server closed.
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
    }
    return balanced | {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}


def _check_port(address: str) -> None:
    """Raise ValueError for a port above the last: gRPC would take the lower 16 bits of it."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) > _LAST_PORT and not address.startswith("unix"):
        raise ValueError(f"the port of {address} is above {_LAST_PORT}")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, or an address in one of gRPC's own forms
        return False
