"""The content of the user's cache: packages and checkpoints that were built or fetched.

The time of the file that makes a result whole is that of its last use.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import PackageError
from engine.package.package import MANIFEST_NAME
from server.packages.cache import BUILT, FETCHED, ORIGIN, locked, user_cache

# Names of what is built, fetched and being fetched. Another directory is nobody's to remove.
_OURS = re.compile(r".+-[0-9a-f]{16}|[0-9a-f]{64}|\.[0-9a-f]{64}\.part")


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
        name = self.key.removeprefix(".").removesuffix(".part")  # what is fetched has its lock
        try:
            with locked(self.directory.parent, name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                for mark in (ORIGIN, MANIFEST_NAME):  # first: half of it is not taken for whole
                    (self.directory / mark).unlink(missing_ok=True)
                shutil.rmtree(self.directory)
        except BlockingIOError:
            raise PackageError(f"{self.key} is being made or read; remove it later") from None
        except OSError as error:
            raise PackageError(
                f"{self.directory} cannot be removed: {error.strerror or error}"
            ) from error


def kept() -> list[Kept]:
    """Return what the cache holds, last used first."""
    cache = user_cache()
    found = [*_kept(cache / BUILT, ORIGIN), *_kept(cache / FETCHED, MANIFEST_NAME)]
    return sorted(found, key=lambda one: -one.used_at)


def remove_unfinished() -> None:
    """Remove what a killed command had begun, unless somebody is at it again."""
    for one in kept():
        if one.kind == "unfinished":
            with suppress(PackageError):
                one.remove()


def _kept(folder: Path, mark: str) -> Iterator[Kept]:
    for directory in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # it was removed meanwhile
            is_ours = _OURS.fullmatch(directory.name) and not directory.is_symlink()
            if not (is_ours and directory.is_dir()):
                continue  # a lock, or another's
            kind, source, used_at = "unfinished", "", directory.stat().st_mtime
            with suppress(OSError, ValueError, KeyError, TypeError):  # half written, or damaged
                if mark == ORIGIN:
                    origin = json.loads((directory / mark).read_bytes())
                    source = " ".join([origin["built_of"], *origin["options"]])
                used_at = (directory / mark).stat().st_mtime
                kind = "fetched package" if mark != ORIGIN else str(origin["kind"])
            yield Kept(directory, kind, source, _num_bytes(directory), used_at)


def _num_bytes(directory: Path) -> int:
    num_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it was renamed meanwhile
                num_bytes += os.lstat(os.path.join(folder, name)).st_size
    return num_bytes
