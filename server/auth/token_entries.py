"""The entries of a file of tokens, checked: every mistake is named with its line and its key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from engine.errors import ConfigError

_WAY = "`tokenweir token` makes a token and its entry"
_INT32 = 2**31


@dataclass(frozen=True)
class TokenEntry:
    """A `[[token]]`."""

    sha256: str
    tenant: str
    max_priority: int = 0
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    models: Sequence[str] | None = None


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


def token_entries(text: str, name: str) -> list[TokenEntry]:
    """Return the entries of a file of that name; ConfigError with the place and the way out."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    found = content.get("token", [])
    if set(content) - {"token"} or not isinstance(found, list):
        wrong = next(iter(set(content) - {"token"}), "token")
        raise ConfigError(f"{name} has {wrong!r}; every entry is a [[token]]; {_WAY}")
    if not found:
        raise ConfigError(f"{name} has no [[token]], so that nobody could call; {_WAY}")
    for index, entry in enumerate(found):
        if problem := _problem_in(entry):
            raise ConfigError(f"{name}: {_place(index, text)}: {problem}")
    entries = [TokenEntry(**entry) for entry in found]
    _check_together(entries, text, name)
    return entries


def _check_together(entries: Sequence[TokenEntry], text: str, name: str) -> None:
    """Refuse a token twice, and two that do not agree on what their tenant may ask for."""
    digests: dict[str, int] = {}
    quotas: dict[str, tuple[int | None, int | None]] = {}
    for index, entry in enumerate(entries):
        where = f"{name}: {_place(index, text)}"
        if digests.setdefault(entry.sha256.lower(), index) != index:
            raise ConfigError(f"{where}: sha256 stands in an entry before, too; take one away")
        quota = entry.max_requests, entry.tokens_per_minute
        if quotas.setdefault(entry.tenant, quota) != quota:
            raise ConfigError(
                f"{where}: max_requests and tokens_per_minute are those of all tokens of tenant "
                f"{entry.tenant!r} together; write the same in each"
            )


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
