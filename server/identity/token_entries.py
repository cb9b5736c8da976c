"""What is in a file of tokens, checked: every mistake is named with its line and its key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from engine.errors import ConfigError

_WAY = "`tokenweir token` makes a token and its entry"
_INT32 = 2**31

_Count = Annotated[int, Field(ge=1)]
_Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")]


class TokenEntry(BaseModel):
    """A `[[token]]`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
    tenant: _Name
    max_priority: Annotated[int, Field(ge=-_INT32, lt=_INT32)] = 0
    max_requests: _Count | None = None
    tokens_per_minute: _Count | None = None
    models: list[_Name] | None = None


_ENTRIES = TypeAdapter(list[TokenEntry])
_WORDS: Mapping[str, str] = {
    "sha256": f"must be the SHA-256 of a token, 64 characters of hex; {_WAY}",
    "tenant": "must be a name of 1 to 64 characters that can be printed",
    "max_priority": "must be a whole number; lower runs earlier, and 0 is normal",
    "max_requests": "must be a whole number from 1 on; leave it out for no limit",
    "tokens_per_minute": "must be a whole number from 1 on; leave it out for no limit",
    "models": "must be a list of names of models; leave it out for all",
}


def token_entries(text: str, name: str) -> list[TokenEntry]:
    """Return the entries of a file of that name; ConfigError with the place and the way out."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    if unknown := sorted(set(content) - {"token"}):
        raise ConfigError(f"{name} has {unknown[0]!r}; every entry is a [[token]]; {_WAY}")
    try:
        entries = _ENTRIES.validate_python(content.get("token", []))
    except ValidationError as error:
        raise ConfigError(f"{name}: {_first_problem(error, text)}") from error
    if not entries:
        raise ConfigError(f"{name} has no [[token]], so that nobody could call; {_WAY}")
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


def _first_problem(error: ValidationError, text: str) -> str:
    problem = error.errors()[0]
    if not problem["loc"]:
        return f"every entry is a [[token]]; {_WAY}"
    index, *keys = problem["loc"]
    key = str(keys[0]) if keys else "the entry"
    match problem["type"]:
        case "missing":
            return f"{_place(int(index), text)}: {key} is missing: it {_WORDS[key]}"
        case "extra_forbidden":
            known = ", ".join(_WORDS)
            return f"{_place(int(index), text)}: {key} is not known; an entry has {known}"
    wrong = f"{key} ({str(problem['input'])[:80]!r})"
    return f"{_place(int(index), text)}: {wrong} {_WORDS.get(key, 'must be a [[token]]')}"


def _place(index: int, text: str) -> str:
    """Return which entry it is, and the line in which it begins."""
    begins = [found.start() for found in re.finditer(r"^[ \t]*\[\[\s*token\s*\]\]", text, re.M)]
    if index >= len(begins):  # written in another way
        return f"token {index + 1}"
    return f"token {index + 1}, line {text.count(chr(10), 0, begins[index]) + 1}"
