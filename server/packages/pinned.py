"""A package by address and content: the same one at every worker, on whatever node."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from engine.errors import PackageError
from engine.package.manifest import Manifest
from engine.package.package import (
    SIGNATURE_NAME,
    Package,
    load_package,
    open_package,
    parse_manifest,
)
from server.packages.address import is_remote
from server.packages.cache import FETCHED, check_digest, fetch, user_cache
from server.packages.remote import RemotePackage


@dataclass(frozen=True)
class PinnedPackage:
    """The address of a package, and its manifest."""

    address: Path | str  # a directory of every node, or a URL that is fetched there
    manifest_sha256: str
    manifest: Manifest

    def load(self, cache: Path | None) -> Package:
        """Return the package, its files checked; from a URL through the cache of this node.

        Raises PackageError if it is damaged, cannot be fetched, or is another one by now.
        """
        if is_remote(self.address):
            return fetch(str(self.address), self.manifest_sha256, cache or user_cache() / FETCHED)
        package = load_package(self.address)
        check_digest(package.manifest_sha256.hex(), self.manifest_sha256, self.address)
        return package


def manifest_at(address: Path | str) -> Manifest:
    """Return the manifest at an address, whoever has signed it; PackageError if there is none."""
    return parse_manifest(_raw_manifest(address), str(address))


def pin(address: Path | str, key: Path | None) -> PinnedPackage:
    """Return the package that is at an address now; at a URL only its manifest is read.

    Raises PackageError if it is none, or not signed by the key that is required, ConfigError if
    that cannot be used.
    """
    raw = _raw_manifest(address)
    manifest = parse_manifest(raw, str(address))
    if key is not None:
        _check_signed(address, key, raw)
    pinned = PinnedPackage(address, sha256(raw).hexdigest(), manifest)
    if not is_remote(address):
        pinned.load(None)
    return pinned


def _raw_manifest(address: Path | str) -> bytes:
    if is_remote(address):
        return RemotePackage(str(address)).manifest()
    return open_package(address)[1]


def _check_signed(address: Path | str, key: Path, raw: bytes) -> None:
    from server.packages.signature import MAX_SIGNATURE_BYTES, check_signature, public_key

    known = public_key(key)
    try:
        if is_remote(address):
            package = RemotePackage(str(address))
            signature = package.small_file(SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
        else:
            with (Path(address) / SIGNATURE_NAME).open("rb") as file:
                signature = file.read(MAX_SIGNATURE_BYTES)
    except (PackageError, OSError) as error:
        raise PackageError(
            f"{address} has no signature that can be read ({error}), and one by {key} is required; "
            f"sign it with: tokenweir sign {address} --key KEY"
        ) from error
    check_signature(signature, known, raw, str(address))
