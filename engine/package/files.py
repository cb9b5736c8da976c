"""Opens and hashes the files of a package, without following links or reading what cannot fit."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import PackageError

_NO_FILE = "is not a file; a package holds plain files, export it again"
_SMALL = 2**30  # a file of so many bytes is read in a second, whatever it holds


class FileEntry(BaseModel):
    """A file of a package."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, lt=2**63)]


class Stamp(NamedTuple):
    """Which file is at a path, and its last change: of content, name or permissions."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds; no program can set it


def hash_file(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(sha256=digest, size=os.fstat(file.fileno()).st_size)


def read_stamp(path: Path) -> Stamp | None:
    """Return the stamp of what is at a path, links not followed; None if nothing is there."""
    try:
        return _stamp(os.lstat(path))
    except FileNotFoundError:
        return None


def check_file(path: Path, expected: FileEntry) -> Stamp:
    """Return the stamp of a file that is as expected, else raise PackageError.

    A file of another size is not read: hashing it could take without end.
    """
    with open_plain(path) as file:
        before = _stamp(os.fstat(file.fileno()))
        if before.size != expected.size:
            raise PackageError(
                f"{path} is damaged: {before.size} bytes, expected {expected.size} bytes; "
                "copy or export it again"
            )
        _refuse_hollow(path, file, before.size)
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(os.fstat(file.fileno())) != before:
            raise PackageError(f"{path} was changed while it was read; load the package again")
    if found != expected.sha256:
        raise PackageError(
            f"{path} is damaged: its SHA-256 is {found[:16]}..., expected "
            f"{expected.sha256[:16]}...; copy or export it again"
        )
    return before


def _refuse_hollow(path: Path, file: FileIO, size: int) -> None:
    """Refuse a large file of which less than half was ever written: it costs its maker nothing."""
    if size <= _SMALL:
        return
    written = start = 0  # bytes that do not lie in holes, counted until they are half of the file
    while written < size // 2:
        try:
            start = os.lseek(file.fileno(), start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        written, start = written + end - start, end
    file.seek(0)
    if written < size // 2:
        raise PackageError(
            f"{path} has {size:,} bytes, of which only {written:,} were ever written; no weights "
            "are so, copy or export it again"
        )


def open_plain(path: Path) -> FileIO:
    """Open a file that is not a link; PackageError for anything else."""
    return open(path, "rb", buffering=0, opener=_open)


def _open(path: str, flags: int) -> int:
    """Open a regular file, and nothing else."""
    # Not blocking: else a named pipe would wait for its writer.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENOENT:
            said = "is missing; copy the package again or export the model again"
        elif error.errno == errno.ELOOP:
            said = "is a link; a package holds plain files, copy it without links"
        elif error.errno == errno.ENXIO:  # a socket
            said = _NO_FILE
        else:
            raise
        raise PackageError(f"{path} {said}") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise PackageError(f"{path} {_NO_FILE}")


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
