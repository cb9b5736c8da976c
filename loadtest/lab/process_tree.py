"""Processor time of a process and all below it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # processor time is counted in so many ticks a second


@dataclass(frozen=True)
class ProcessUse:
    """Resources that one process has used so far."""

    name: str
    processor_seconds: float


def read_tree(root: int) -> dict[int, ProcessUse]:
    """Return what a process and all below it have used, by process id."""
    parents = {pid: _parent(pid) for pid in _process_ids()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    uses = {}
    for pid in found:
        with contextlib.suppress(OSError):  # it has just ended
            uses[pid] = _read_use(pid)
    return uses


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _read_use(pid: int) -> ProcessUse:
    stat = _stat(pid)
    name = _name(Path(f"/proc/{pid}/cmdline").read_bytes())
    return ProcessUse(name, (int(stat[11]) + int(stat[12])) / _TICKS)


def _name(command_line: bytes) -> str:
    """Return what a person calls the process: its title or program, or the script it runs."""
    words = command_line.decode(errors="replace").split("\0")
    if not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name if words[0].startswith("/") else words[0]
    if words[1:2] == ["-c"] and "serve" in words:
        return "tokenweir serve"
    scripts = [word for word in words[1:] if word and not word.startswith("-")]
    return Path(scripts[0]).name if scripts else words[0]
