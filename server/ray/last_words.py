"""The last output of a dead process to its standard error, which no logger has seen."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_BYTES = 8192


def own_stderr() -> str:
    """Return the file that this process's standard error goes to; "" if it is none."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def last_words(path: str) -> str:
    """Return the end of such a file, in whole lines; "" if there is none on this machine."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_BYTES))
            data = file.read()
    except OSError:
        return ""
    text = data.decode(errors="replace")
    return (text.partition("\n")[2] if size > _MAX_BYTES else text).strip()
