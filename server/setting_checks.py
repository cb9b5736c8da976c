"""Checks of settings: each names the setting, its value and the limit; an unknown one is told the
nearest known name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import SequenceMatcher

from engine.errors import ConfigError


def check_port(port: int, name: str = "port") -> None:
    """Raise ConfigError for what is no port; 0 is any that is free."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name} ({port}) must be 1 to 65535, or 0 for any that is free")


def check_at_least_one(config: object, *names: str) -> None:
    """Raise ConfigError if one of the settings is below 1."""
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name} ({value}) must be at least 1")


def check_positive(config: object, *names: str) -> None:
    """Raise ConfigError if one of the settings is not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} ({value}) must be above 0 and finite")


def check_not_negative(config: object, *names: str) -> None:
    """Raise ConfigError if one of the settings, in seconds, is below 0 or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} ({value}) must be 0 or more seconds")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like one that is not, as a whole and without its section."""

    def likeness(other: str) -> float:
        key, other_key = name.rpartition(".")[2], other.rpartition(".")[2]
        return _ratio(name, other) + _ratio(key, other_key)

    return max(known, key=likeness)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
