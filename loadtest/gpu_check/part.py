"""A part of the check: what runs in a process of its own, and what came of it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "measured", "crashed", "timed out", "not run"]
Found = dict[str, Any]  # as it stands in the JSON

BAD: tuple[Status, ...] = ("failed", "crashed", "timed out")


def is_emulated() -> bool:
    """Return whether kernels do nothing here: this process has what only tests/emulated has."""
    return hasattr(ctypes.CDLL(None), "emu_launches")


@dataclass(frozen=True)
class Settings:
    """The settings of every part."""

    device: Literal["cuda", "cpu"]  # cpu: to try the check itself
    quick: bool  # small models, few turns: shows that the parts run, no speed
    work: Path  # checkpoints and packages, made once and kept


@dataclass(frozen=True)
class Part:
    """A function, `module:function`, that is called with Settings and the arguments."""

    name: str
    run: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60.0  # it is expected to take
    limit: float = 300.0  # seconds after which it is ended
    needs_device: bool = False  # so that there is nothing to run on a CPU

    def within(self, seconds: float, limit: float) -> Part:
        """Return this part with other times."""
        return replace(self, seconds=seconds, limit=limit)


@dataclass(frozen=True)
class Outcome:
    """The findings of a part's function; `passed` is None if nothing can be wrong."""

    summary: str  # a few words for the table
    found: Found
    passed: bool | None = None


@dataclass(frozen=True)
class Result:
    """The status and the findings of a part."""

    name: str
    status: Status
    seconds: float
    summary: str  # the findings, or why there are none
    found: Found = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether something was wrong, or broke before it could be known."""
        return self.status in BAD
