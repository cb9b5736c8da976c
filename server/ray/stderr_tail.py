"""The last output of a dead process to its standard error, which no logger has seen.

By it a crash is told from an end that came from outside; `server.gateway.losses.Loss` says why.
"""

from __future__ import annotations

import os
from pathlib import Path

_MAX_BYTES = 8192
_MAX_CRASH_BYTES = 1 << 16  # stacks and a list of modules stand behind the first line of a crash
_OF_RAY = (":job_id:", ":actor_name:", ":task_name:")  # begin lines by which Ray tells who writes
_CRASH = "Fatal Python error: "  # as faulthandler begins


def own_stderr() -> str:
    """Return the file that this process's standard error goes to; "" if it is none."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def stderr_tail(path: str) -> str:
    """Return the end of such a file, in whole lines; "" if there is none on this machine."""
    text = _end_of(path, _MAX_BYTES) or ""
    lines = text.splitlines()[len(text.encode()) >= _MAX_BYTES :]
    return "\n".join(line for line in lines if not line.startswith(_OF_RAY)).strip()


def has_crashed(path: str, oom_kills: int) -> bool | None:
    """Return whether a dead process that wrote to a file crashed; None if nobody can tell.

    `oom_kills` is what `num_oom_kills` has returned while it lived.
    """
    if (text := _end_of(path, _MAX_CRASH_BYTES)) is None:
        return None
    if _CRASH in text:
        return True
    return False if num_oom_kills() == oom_kills else None


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed here for want of memory."""
    try:
        counters = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def _end_of(path: str, num_bytes: int) -> str | None:
    """Return the last bytes of a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return None
