"""A part of the check: what is told to it, what comes of it, and how long it may take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "measured", "failed", "crashed", "timed out", "not run"]
Found = dict[str, Any]  # as it stands in the JSON

BAD: tuple[Status, ...] = ("failed", "crashed", "timed out")


def is_emulated() -> bool:
    """Return whether kernels do nothing here: this process has what only tests/emulated has."""
    return hasattr(ctypes.CDLL(None), "emu_launches")


@dataclass(frozen=True)
class Settings:
    """The settings of every part."""

    work: Path  # checkpoints and packages, made once and kept
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: to try the check itself
    quick: bool = False  # tiny models: shows that parts run, and no speed
    rounds: int = 3
    concurrencies: tuple[int, ...] = (1, 32, 256)


@dataclass(frozen=True)
class Part:
    """Something that is asked of the machine; "kind.model.more" is its name."""

    name: str
    package: str  # needed package, "MODEL.FORMAT"; "": none
    seconds: float  # it is expected to take on a GPU, its package there
    limit: float  # seconds after which it is ended


@dataclass(frozen=True)
class Outcome:
    """The findings of a part; `passed` is None if nothing can be wrong."""

    summary: str  # a few words for the table
    found: Found = field(default_factory=dict)
    passed: bool | None = None


@dataclass(frozen=True)
class Result:
    """The status and the findings of a part."""

    name: str
    status: Status
    estimated: float  # seconds
    seconds: float
    summary: str  # the findings, or why there are none
    found: Found = field(default_factory=dict)
