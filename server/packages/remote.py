"""A package that is not on this machine: its files are read through fsspec, as large as they say.

Every failure there is told as a PackageError with the address of the file.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import PackageError, PackageUnreachable
from engine.package.files import FileEntry
from engine.package.package import MANIFEST_NAME, MAX_MANIFEST_BYTES

_CHUNK = 4 << 20  # bytes
_OF_NETWORK = (ConnectionError, TimeoutError, socket.gaierror)
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


class RemotePackage:
    """The files of a package at a URL."""

    def __init__(self, url: str) -> None:
        """Raise PackageError, naming what to install, if nothing here reads such URLs.

        One with a password is refused: logs, errors and lists of processes would show it.
        """
        if _PASSWORD.search(url):
            raise PackageError(
                "the address of a package has a password, which logs would show; give it to "
                "fsspec in its file of settings (~/.config/fsspec) or as FSSPEC_... on every node"
            )
        from fsspec.core import url_to_fs  # a server of local packages needs none

        self._url = url.rstrip("/")
        try:
            found = url_to_fs(self._url)
        except ImportError as error:
            raise PackageError(f"{url} cannot be read: {_to_install(error)}") from error
        except Exception as error:
            raise PackageError(f"{url} is not the address of a package: {_told(error)}") from error
        self._files: Any = found[0]
        self._path = str(found[1]).rstrip("/")

    def manifest(self) -> bytes:
        """Return the bytes of its manifest."""
        return self.small_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)

    def small_file(self, name: str, max_bytes: int) -> bytes:
        """Return all of a file; PackageError if it is missing or larger than that."""
        content = b"".join(self._read(name, max_bytes + 1))
        if len(content) > max_bytes:
            raise PackageError(f"{self._url}/{name} has more than {max_bytes:,} bytes")
        return content

    def copy(self, name: str, expected: FileEntry, target: Path) -> None:
        """Write a file to a path; PackageError, and no file, if it is not the one expected."""
        size, digest = 0, hashlib.sha256()
        try:
            with target.open("xb") as copied:
                for chunk in self._read(name, expected.size + 1):
                    copied.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
            self._check(name, expected, size, digest.hexdigest())
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _check(self, name: str, expected: FileEntry, size: int, digest: str) -> None:
        if size != expected.size:
            found = f"more than {expected.size:,}" if size > expected.size else f"{size:,}"
            problem = f"{found} bytes came, its manifest says {expected.size:,}"
        elif digest != expected.sha256:
            problem = (
                f"its SHA-256 is {digest[:16]}..., its manifest says {expected.sha256[:16]}..."
            )
        else:
            return
        raise PackageError(
            f"{self._url}/{name} was cut off or is wrong: {problem}; upload it again"
        )

    def _read(self, name: str, most: int) -> Iterator[bytes]:
        """Return what a file holds, but not more than so many bytes of it."""
        try:
            with self._files.open(f"{self._path}/{name}", "rb") as file:
                while most > 0 and (chunk := file.read(min(_CHUNK, most))):
                    most -= len(chunk)
                    yield chunk
        except Exception as error:
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: Exception) -> PackageError:
        if isinstance(error, ImportError):
            return PackageError(f"{self._url} cannot be read: {_to_install(error)}")
        cause: BaseException | None = error
        while cause is not None:  # fsspec calls a file missing behind an error of the network
            if isinstance(cause, _OF_NETWORK):
                return PackageUnreachable(f"{self._url} does not answer: {_told(cause)}")
            cause = cause.__cause__
        if isinstance(error, FileNotFoundError):
            return PackageError(
                f"{self._url}/{name} is missing; a package is a directory with its "
                f"{MANIFEST_NAME} and all files that this names"
            )
        return PackageError(f"{self._url}/{name} cannot be read: {_told(error)}")


def _to_install(error: ImportError) -> str:
    """Return what fsspec wants to be installed; it knows the package for every kind of URL."""
    return f"{error}; install what is missing with pip, on every node"


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
