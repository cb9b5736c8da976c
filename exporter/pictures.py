"""Finds the pictures that lie in a directory, a folder a class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from engine.errors import ConfigError
from engine.wording import listed

SUFFIXES = (".png", ".jpg", ".jpeg")


class Picture(NamedTuple):
    """A file, and the class that it is of."""

    path: Path
    label: str  # the folder of the directory in which it lies, at any depth; "": in none


def find_pictures(directory: Path) -> list[Picture]:
    """Return the PNG and JPEG files, in order.

    Hidden files are not a person's own: thumbnails, and the notes that macOS lays beside files.
    Raises ConfigError for what is no directory, and names pictures of kinds that are not read.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give one with a folder for every class")
    files = list(_files(directory))
    could_be = {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    kinds = could_be - set(SUFFIXES)
    found = [one for one in files if one.path.suffix.lower() in SUFFIXES]
    others = [one.path for one in files if one.path.suffix.lower() in kinds]
    if others:
        raise ConfigError(
            f"{len(others):,} pictures are not PNG or JPEG, which alone are read: "
            f"{listed(others)}; convert them, or take them out of {directory}"
        )
    return found


def class_folders(directory: Path) -> list[Path]:
    """Return the folders that are classes, in order."""
    return [path for path in _shown(directory.iterdir(), directory) if path.is_dir()]


def _files(directory: Path) -> Iterator[Picture]:
    for path in _shown(directory.iterdir(), directory):
        if not path.is_dir():
            yield Picture(path, "")
    for folder in class_folders(directory):  # each by itself, for it may be a link
        for path in _shown(folder.rglob("*"), folder):
            yield Picture(path, folder.name)


def _shown(paths: Iterator[Path], directory: Path) -> list[Path]:
    return [
        path
        for path in sorted(paths)
        if not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
