"""A setting: a field of a dataclass that has its help, bounds and option of the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from engine.errors import ConfigError

# As pydantic names them, and as a person does.
BOUNDS: Mapping[str, str] = {"ge": "at least", "gt": "above", "le": "at most"}
FINITE: Mapping[str, Any] = {"allow_inf_nan": False}  # the same, of a number with an end


def setting(default: Any, help: str, *, option: str | None = None, **more: Any) -> Any:
    """Return a field with a default, or with what a class makes for one.

    `more` are its bounds, and what its option shows: `metavar`, and `unset` for no default.
    """
    metadata = {"help": help, "option": option, **more}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def told_bounds(metadata: Mapping[str, Any]) -> str:
    """Return the bounds of a setting in words, such as "above 0 and at most 1"."""
    told = [f"{word} {metadata[name]}" for name, word in BOUNDS.items() if name in metadata]
    is_open = FINITE.keys() <= metadata.keys() and "le" not in metadata
    return " and ".join([*told, *(["finite"] if is_open else [])])


def check_bounds(settings: Any) -> None:
    """Raise ConfigError for a number of a dataclass that is out of its bounds, or none."""
    for one in fields(settings):
        check_value(one.name, getattr(settings, one.name), one.metadata)


def check_value(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number that is out of the bounds of a setting, or none."""
    if isinstance(value, int | float) and not (
        value >= bounds.get("ge", value)
        and value <= bounds.get("le", value)
        and ("gt" not in bounds or value > bounds["gt"])
        and (bounds.get("allow_inf_nan", True) or math.isfinite(value))
    ):
        raise ConfigError(f"{name} ({value}) must be {told_bounds(bounds)}")
