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
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, Unauthenticated
from server.auth.files import WatchedFiles

METADATA_KEY = "authorization"
_SCHEME = "bearer "
_LOOK_PERIOD = 1.0  # seconds between two looks at the file
_WAY = "`tokenweir token` makes a token and its entry"
_INT32 = 2**31


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_priority(value: Any) -> bool:
    return type(value) is int and -_INT32 <= value < _INT32


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f\x7f]{1,64}", value) is not None


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value) is not None


_NAME = "a name of 1 to 64 characters that can be printed"
_COUNT = "must be a whole number from 1 on; leave it out for no limit"
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "sha256": (_is_digest, f"must be the SHA-256 of a token, 64 characters of hex; {_WAY}"),
    "tenant": (_is_name, f"must be {_NAME}"),
    "max_priority": (
        _is_priority,
        "must be a whole number of 32 bits; lower runs earlier, and 0 is normal",
    ),
    "max_requests": (_is_count, _COUNT),
    "tokens_per_minute": (_is_count, _COUNT),
    "models": (_are_names, f"must be a list of models, each {_NAME}; leave it out for all"),
}
_NEEDED = ("sha256", "tenant")


def problem_of(key: str, value: Any) -> str | None:
    """Return what is wrong with the value of a key of an entry, as TOML has it; None: nothing."""
    is_right, rule = _RULES[key]
    return None if is_right(value) else f"{key} ({str(value)[:80]!r}) {rule}"


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
    """Return the entries of a file; ConfigError names a mistake with its line and its key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tokens cannot be read from {path}: {error}; `tokenweir token` makes one and its entry"
        ) from error
    known: dict[bytes, list[tuple[bytes, Identity]]] = {}
    seen: set[bytes] = set()
    quotas: dict[str, tuple[int | None, int | None]] = {}
    for index, entry in enumerate(_entries(text, path)):
        where = f"{path}: {_place(index, text)}"
        if problem := _problem_in(entry):
            raise ConfigError(f"{where}: {problem}")
        digest, models = bytes.fromhex(entry.pop("sha256")), entry.pop("models", None)
        if digest in seen:
            raise ConfigError(f"{where}: sha256 stands in an entry before, too; take one away")
        seen.add(digest)
        identity = Identity(**entry, models=None if models is None else frozenset(models))
        quota = identity.max_requests, identity.tokens_per_minute
        if quotas.setdefault(identity.tenant, quota) != quota:
            raise ConfigError(
                f"{where}: max_requests and tokens_per_minute are those of all tokens of tenant "
                f"{identity.tenant!r} together; write the same in each"
            )
        known.setdefault(digest[:4], []).append((digest, identity))
    return known


def _entries(text: str, path: Path) -> list[Any]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    found = content.get("token", [])
    if set(content) - {"token"} or not isinstance(found, list):
        wrong = next(iter(set(content) - {"token"}), "token")
        raise ConfigError(f"{path} has {wrong!r}; every entry is a [[token]]; {_WAY}")
    if not found:
        raise ConfigError(f"{path} has no [[token]], so that nobody could call; {_WAY}")
    return found


def _problem_in(entry: Any) -> str | None:
    """Return the first thing that is wrong with an entry."""
    if not isinstance(entry, dict):
        return f"every entry is a [[token]]; {_WAY}"
    for key in entry:
        if key not in _RULES:
            (nearest,) = get_close_matches(key[:80], _RULES, 1, cutoff=0.0)
            return f"there is no {key[:80]}; the nearest is {nearest}"
    for key in _NEEDED:
        if key not in entry:
            return f"{key} is missing: it {_RULES[key][1]}"
    found = (problem_of(key, value) for key, value in entry.items())
    return next((problem for problem in found if problem), None)


def _place(index: int, text: str) -> str:
    """Return which entry it is, and the line in which it begins."""
    begins = [found.start() for found in re.finditer(r"^[ \t]*\[\[\s*token\s*\]\]", text, re.M)]
    if index >= len(begins):  # written in another way
        return f"token {index + 1}"
    return f"token {index + 1}, line {text.count(chr(10), 0, begins[index]) + 1}"
