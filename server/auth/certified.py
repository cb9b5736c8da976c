"""The name on a client's certificate; an adapter forwards the one that it has seen.

The gateway believes it at its socket of this machine only, which nobody but this user reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CERTIFIED_KEY = "tokenweir-certified-bin"  # a key of metadata


def certified_name(certificate: Mapping[str, Any]) -> str:
    """Return the common name of a certificate as Python's ssl tells it, else its first other name.

    "" is one without a name.
    """
    parts = (pair for part in certificate.get("subject", ()) for pair in part)
    others = certificate.get("subjectAltName", ())
    names = [value for key, value in parts if key == "commonName"]
    return str(next(iter((*names, *(value for _, value in others))), ""))


def forwarded_name(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the name that an adapter forwards with a call; None without one."""
    told = dict(metadata).get(CERTIFIED_KEY)
    return told.decode(errors="replace") if isinstance(told, bytes) else None
