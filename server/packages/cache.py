"""Packages that were fetched, a directory each under the SHA-256 of the manifest.

One process of a node fetches a package while others wait for it. Packages that are not whole, or
were changed since, are fetched again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from engine.errors import PackageError
from engine.package.package import MANIFEST_NAME, Package, load_package, parse_manifest
from server.packages.remote import RemotePackage

logger = logging.getLogger(__name__)


FETCHED, BUILT = "packages", "built"  # folders of the cache
ORIGIN = "origin.json"  # beside what was built, when it is whole
_LOCKS = ".{}.lock"


def user_cache() -> Path:
    """Return the directory of TOKENWEIR_CACHE, else that in the user's cache folder.

    Raises PackageError for a user that has none, as in a container that runs under another number,
    and for a file in its place.
    """
    if given := os.environ.get("TOKENWEIR_CACHE"):
        cache = Path(given).expanduser().absolute()
        if cache.exists() and not cache.is_dir():
            raise PackageError(f"TOKENWEIR_CACHE={given} is a file; set it to a directory")
        return cache
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise PackageError(
            f"user {os.getuid()} has no home directory to keep packages in; set TOKENWEIR_CACHE to "
            "a directory, or HOME"
        )
    return Path(base) / "tokenweir"


def fetch(url: str, manifest_sha256: str, cache: Path) -> Package:
    """Return the package of this manifest, checked; fetch it if the cache does not have it.

    Raises PackageError if the cache cannot be used, or if what is at the URL is not that package.
    """
    try:
        make_private(cache)
        return _fetched(url, manifest_sha256, cache)
    except OSError as error:
        raise PackageError(
            f"{url} cannot be kept in {cache}: {error}; choose another directory with "
            "--package-cache"
        ) from error


def _fetched(url: str, digest: str, cache: Path) -> Package:
    directory = cache / digest
    with locked(cache, digest, fcntl.LOCK_SH), suppress(PackageError):
        return _load(directory, digest)
    with locked(cache, digest):
        try:
            return _load(directory, digest)  # another process was first
        except PackageError as error:
            if directory.exists():
                logger.warning("%s; it is fetched again", error)
        _download(RemotePackage(url), url, digest, cache)
        return _load(directory, digest)


def _load(directory: Path, digest: str) -> Package:
    package = load_package(directory)
    if package.manifest_sha256.hex() != digest:
        raise PackageError(f"{directory} has another manifest than its name says")
    return package


def _download(remote: RemotePackage, url: str, digest: str, cache: Path) -> None:
    """Bring a package into the cache: whole, or not at all."""
    part = cache / f".{digest}.part"
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir(mode=0o700)
    try:
        raw = remote.manifest()
        check_digest(sha256(raw).hexdigest(), digest, url)
        manifest = parse_manifest(raw, url)
        num_bytes = sum(entry.size for entry in manifest.files.values())
        if num_bytes > (free := shutil.disk_usage(cache).free):
            raise PackageError(
                f"{url} has {num_bytes:,} bytes, and {cache} has room for {free:,}; make room, or "
                "choose another directory with --package-cache"
            )
        logger.info("fetching %s", url)
        for name, entry in manifest.files.items():
            remote.copy(name, entry, part / name)
        (part / MANIFEST_NAME).write_bytes(raw)
        shutil.rmtree(cache / digest, ignore_errors=True)
        part.rename(cache / digest)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_digest(found: str, expected: str, address: Path | str) -> None:
    """Raise PackageError if the manifest at an address is not the one that is to be served."""
    if found != expected:
        raise PackageError(
            f"{address} is another package than when the server was started; start it again to "
            "serve this one, or put the other back"
        )


def make_private(cache: Path) -> None:
    """Make a directory that its user alone may enter; PackageError if others may write to it."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PackageError(
            f"{cache} can be written by others, who could change what is served; give it to this "
            "user alone (chmod 700), or choose another directory with --package-cache or "
            "TOKENWEIR_CACHE"
        )


@contextmanager
def locked(cache: Path, name: str, how: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Hold the lock of a name in a directory, against all processes of this machine.

    Gives its descriptor: a process that inherits it holds the lock as well.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(cache / _LOCKS.format(name), flags, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
