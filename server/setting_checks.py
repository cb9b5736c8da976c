"""What a setting may be: each check names the setting, its value and the limit."""

from __future__ import annotations

import math

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
