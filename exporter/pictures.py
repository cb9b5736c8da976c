"""Finds the pictures that lie in a directory, at any depth."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".png", ".jpg", ".jpeg")


def find_pictures(directory: Path) -> list[Path]:
    """Return the PNG and JPEG files, in order.

    What is hidden is not a person's own: thumbnails, and the notes that macOS lays beside files.
    """
    return [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
