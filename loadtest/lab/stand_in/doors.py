"""A certificate, a token and quotas for a gateway on a stand-in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loadtest.lab.stand_in.model import NAME
from server.identity.config import DoorsConfig
from server.identity.peers import NAME as HOST
from server.identity.peers import peers_of

_TOKEN = "tw_stand-in"
_ENTRY = """[[token]]
sha256 = "{sha256}"
tenant = "stand-in"
max_requests = 10_000
tokens_per_minute = 1_000_000_000_000
models = ["{model}"]
"""


def make_doors(folder: Path) -> DoorsConfig:
    """Write the files into a folder, with `client.json` for clients: the token, and the host.

    Clients need `cert.pem`, too.
    """
    cert, key, tokens = (folder / name for name in ("cert.pem", "key.pem", "tokens.toml"))
    peers = peers_of("any that is not this machine")
    assert peers is not None
    cert.write_bytes(peers.cert)
    key.write_bytes(peers.key)
    sha256 = hashlib.sha256(_TOKEN.encode()).hexdigest()
    tokens.write_text(_ENTRY.format(sha256=sha256, model=NAME))
    (folder / "client.json").write_text(json.dumps({"token": _TOKEN, "host": HOST}))
    return DoorsConfig(tls_cert=cert, tls_key=key, tokens=tokens)
