"""A certificate, a token and quotas for a gateway on a stand-in, and who has them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
from grpc import aio
from tokenweir import AsyncClient

from loadtest.studies.stand_in import NAME
from server.identity.config import DoorsConfig
from server.identity.peers import CHANNEL_OPTIONS, peers_of

_TOKEN = "tw_stand-in"
_CERT, _KEY, _TOKENS = "cert.pem", "key.pem", "tokens.toml"
_ENTRY = """[[token]]
sha256 = "{sha256}"
tenant = "stand-in"
max_requests = 10_000
tokens_per_minute = 1_000_000_000_000
models = ["{model}"]
"""


class Doors:
    """Files in a folder that both sides of the door read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self) -> None:
        """Write the files."""
        peers = peers_of("any that is not this machine")
        assert peers is not None
        (self._folder / _CERT).write_bytes(peers.cert)
        (self._folder / _KEY).write_bytes(peers.key)
        sha256 = hashlib.sha256(_TOKEN.encode()).hexdigest()
        (self._folder / _TOKENS).write_text(_ENTRY.format(sha256=sha256, model=NAME))

    @property
    def config(self) -> DoorsConfig:
        """What a gateway is told."""
        cert, key, tokens = (self._folder / name for name in (_CERT, _KEY, _TOKENS))
        return DoorsConfig(tls_cert=cert, tls_key=key, tokens=tokens)

    def client(self, address: str) -> AsyncClient:
        """Return a client with a token, by TLS."""
        roots = (self._folder / _CERT).read_bytes()
        credentials = grpc.ssl_channel_credentials(roots)
        channel = aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        return AsyncClient(channel=channel, timeout=600, token=_TOKEN)
