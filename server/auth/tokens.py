"""Bearer tokens, and whose they are: a file that is read again when it changes.

    [[token]]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "acme"
    max_priority = -1          # the lowest number, so the earliest turn, of its requests
    max_requests = 8           # open at once
    tokens_per_minute = 60000  # read, generated and discarded
    models = ["dates"]         # no others

The file holds no token, but what tells one that is shown.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.errors import ConfigError, Unauthenticated
from server.auth.files import WatchedFiles
from server.auth.token_entries import token_entries

METADATA_KEY = "authorization"
_SCHEME = "bearer "
_LOOK_PERIOD = 1.0  # seconds between two looks at the file


@dataclass(frozen=True)
class Identity:
    """A caller and its limits; None: as much as there is."""

    tenant: str
    max_priority: int = 0  # the lowest number, so the earliest turn
    max_requests: int | None = None  # open at once
    tokens_per_minute: int | None = None
    models: frozenset[str] | None = None


class TokenFile:
    """Tells identities by the tokens that calls show; any thread may ask."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; ConfigError with the place in it if that cannot be used."""
        self._known = WatchedFiles([path], partial(_read, path), _LOOK_PERIOD, clock)

    def identity(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Return the sender of a call's metadata; Unauthenticated without a token of the file."""
        digest = hashlib.sha256(_token_in(metadata).encode()).digest()
        # Found by a part of what nobody can choose, compared in a time that says nothing.
        for known, identity in self._known.content().get(digest[:4], ()):
            if hmac.compare_digest(known, digest):
                return identity
        raise Unauthenticated("the token of this call is not known here; ask for another one")


def _token_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    found = [str(value) for key, value in metadata if key == METADATA_KEY]
    if not found:
        raise Unauthenticated(
            "this server asks for a token, and the call has none; send the header (in gRPC the "
            "metadata) `authorization: Bearer TOKEN` (--token, or TOKENWEIR_TOKEN)"
        )
    (value, *others) = found
    if others or value[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("`authorization` must be `Bearer` and one token")
    return value[len(_SCHEME) :].strip()


_Known = Mapping[bytes, Sequence[tuple[bytes, Identity]]]  # by the first bytes of the digest


def _read(path: Path) -> _Known:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tokens cannot be read from {path}: {error}; `tokenweir token` makes one and its entry"
        ) from error
    known: dict[bytes, list[tuple[bytes, Identity]]] = {}
    for entry in token_entries(text, str(path)):
        identity = Identity(
            entry.tenant,
            entry.max_priority,
            entry.max_requests,
            entry.tokens_per_minute,
            None if entry.models is None else frozenset(entry.models),
        )
        digest = bytes.fromhex(entry.sha256)
        known.setdefault(digest[:4], []).append((digest, identity))
    return known
