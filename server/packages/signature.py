"""A signature over a manifest, and so over every file whose hash the manifest has.

`manifest.json.sig` holds the 64 bytes of an Ed25519 signature of the bytes of `manifest.json`, as
`openssl pkeyutl -sign -rawin` writes them. Keys are PEM, as `openssl genpkey` writes them.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from engine.errors import ConfigError, PackageError
from engine.package.package import SIGNATURE_NAME, open_package, parse_manifest

SIGNATURE_BYTES = 64
_MAX_KEY_BYTES = 1 << 16
_MAKING = "openssl genpkey -algorithm ed25519 -out key.pem"
_PUBLISHING = "openssl pkey -in key.pem -pubout -out key.pub"


def sign(package: Path, key: Path) -> Path:
    """Write the signature of a package's manifest beside it; return its path.

    Raises ConfigError for a key that cannot be used, PackageError for what is no package.
    """
    private = _private_key(key)
    directory, raw = open_package(package)
    parse_manifest(raw, str(directory))
    path = directory / SIGNATURE_NAME
    whole = directory.parent / f".{directory.name}.{SIGNATURE_NAME}-{os.getpid()}"
    try:
        whole.write_bytes(private.sign(raw))
        whole.replace(path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error}") from error
    finally:
        whole.unlink(missing_ok=True)
    return path


def public_key(path: Path) -> Ed25519PublicKey:
    """Return the key of a file; ConfigError if it has none that signatures are checked with."""
    try:
        found = serialization.load_pem_public_key(_content(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a public key in PEM; make one: {_PUBLISHING}") from error
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigError(f"{path} is not a key of Ed25519; make one: {_MAKING}; {_PUBLISHING}")
    return found


def check_signature(raw: bytes, signature: bytes, key: Ed25519PublicKey, place: str) -> None:
    """Raise PackageError if the key has not signed the manifest with these bytes."""
    try:
        key.verify(signature, raw)
    except InvalidSignature as error:
        raise PackageError(
            f"{place}: {SIGNATURE_NAME} is not the signature of its manifest by the required key; "
            "the package was changed since, or another key has signed it"
        ) from error


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        found = serialization.load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise ConfigError(
            f"{path} is not a private key in PEM without a password; make one: {_MAKING}"
        ) from error
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not a key of Ed25519; make one: {_MAKING}")
    return found


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from error
