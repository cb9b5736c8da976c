"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return what tells one content of files from the next, without reading them.

    A link counts as what it leads to: secrets are often renewed by another link.
    """
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
