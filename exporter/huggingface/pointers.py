"""Tells files of a repository that was cloned without those that Git LFS keeps apart."""

from __future__ import annotations

from pathlib import Path

from engine.wording import listed

_BEGINNING = b"version https://git-lfs"


def about_pointers(directory: Path) -> str:
    """Return what to say behind an error if files of a directory only name what they stand for."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and _is_one(path))
    if not names:
        return ""
    return f"; of {listed(names)} there are only pointers of Git LFS: `git lfs pull` brings them"


def _is_one(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
