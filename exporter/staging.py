"""A directory that is made beside its place and takes it when it is whole."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import PackageError


class Staging:
    """One directory in the making; a hidden one beside its place holds it and what it replaces."""

    def __init__(self, out: Path, hidden: Path) -> None:
        self._out = out
        self._old = hidden / "old"
        self.directory = hidden / "new"
        self.directory.mkdir()

    def publish(self) -> None:
        """Put the finished directory in its place; what was there is gone."""
        if self._out.exists():
            self._out.rename(self._old)
        try:
            self.directory.rename(self._out)
        except OSError:
            _restore(self._old, self._out)
            raise


@contextmanager
def stage(out: Path) -> Iterator[Staging]:
    """Give a directory to be filled and published; without that, nothing of it is left.

    What a process that was killed left beside `out` is removed first. Raises PackageError where
    the disk or its permissions do not let it be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        with _hidden_directory(out) as hidden:
            yield Staging(out, hidden)
    except OSError as error:
        raise PackageError(
            f"cannot write {out}: {error.strerror or error}; "
            "free space there or give a directory that you may write to"
        ) from error


@contextmanager
def _hidden_directory(out: Path) -> Iterator[Path]:
    """Make a directory that is locked as long as this process lives, and remove it."""
    hidden = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    try:
        with _lock(hidden):
            yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    for hidden in out.parent.glob(f"{glob.escape(_prefix(out))}????????/"):
        with suppress(OSError), _lock(hidden):  # that of a living process cannot be had
            _restore(hidden / "old", out)
            shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; OSError if another holds it. It ends with the process."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _restore(old: Path, out: Path) -> None:
    if old.exists() and not out.exists():
        old.rename(out)


def _prefix(out: Path) -> str:
    return f".{out.name}.export-"
