"""The content of the user's cache: packages and checkpoints that were built or fetched.

The time of the file that makes a result whole is that of its last use.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import PackageError
from engine.package.package import MANIFEST_NAME
from server.packages.build import ORIGIN
from server.packages.cache import BUILT, FETCHED, locked, user_cache


@dataclass(frozen=True)
class Kept:
    """A directory of the cache."""

    directory: Path
    kind: str  # package, checkpoint, fetched package, or unfinished
    built_of: str
    num_bytes: int
    used_at: float  # seconds since the epoch

    @property
    def key(self) -> str:
        """Its name in the cache, by which it is removed."""
        return self.directory.name

    def remove(self) -> None:
        """Remove it; PackageError while it is being built or fetched."""
        try:
            with locked(self.directory.parent, self.key, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(self.directory)
        except BlockingIOError:
            raise PackageError(f"{self.key} is being made or read; remove it later") from None
        except OSError as error:
            raise PackageError(f"{self.directory} cannot be removed: {error.strerror}") from error


def kept() -> list[Kept]:
    """Return what the cache holds, last used first."""
    cache = user_cache()
    found = [*_kept(cache / BUILT, ORIGIN), *_kept(cache / FETCHED, MANIFEST_NAME)]
    return sorted(found, key=lambda one: -one.used_at)


def _kept(folder: Path, mark: str) -> Iterator[Kept]:
    for directory in folder.iterdir() if folder.is_dir() else ():
        if not directory.is_dir():
            continue  # a lock
        whole = directory / mark
        kind, source, used_at = "unfinished", "", directory.stat().st_mtime
        if whole.is_file():
            used_at, kind = whole.stat().st_mtime, "fetched package"
            if mark == ORIGIN:
                origin = json.loads(whole.read_bytes())
                kind, source = origin["kind"], " ".join([origin["built_of"], *origin["options"]])
        sizes = (path.lstat().st_size for path in directory.rglob("*") if path.is_file())
        yield Kept(directory, kind, source, sum(sizes), used_at)
