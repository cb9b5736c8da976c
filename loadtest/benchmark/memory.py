"""The memory that this process uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Memory of the process in bytes; None where the system does not tell."""

    resident: int | None
    peak: int | None  # the highest resident so far
    mapped: int | None  # the resident pages of files: the kernel can reclaim them


def read_memory() -> Memory:
    """Return what this process uses now and has used at most."""
    status = Path("/proc/self/status")
    if not status.exists():
        return Memory(None, None, None)
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status.read_text(), re.MULTILINE))
    return Memory(*(int(kilobytes[name]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile")))
