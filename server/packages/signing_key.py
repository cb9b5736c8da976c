"""A key that packages are signed with: PEM, on one of the curves that model-signing takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from engine.errors import ConfigError

# As Sigstore's protocol pairs them.
_HASHES: Mapping[str, Callable[[], hashes.HashAlgorithm]] = MappingProxyType(
    {"secp256r1": hashes.SHA256, "secp384r1": hashes.SHA384, "secp521r1": hashes.SHA512}
)
_MAX_BYTES = 1 << 16
_MAKING = "openssl ecparam -genkey -noout -name prime256v1 -out key.pem"
_PUBLISHING = "openssl pkey -in key.pem -pubout -out key.pub"


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of a file; ConfigError if it has none that signs."""
    try:
        found = load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise ConfigError(
            f"{path} is not a private key in PEM without a password; make one: {_MAKING}"
        ) from error
    if not isinstance(found, ec.EllipticCurvePrivateKey) or found.curve.name not in _HASHES:
        raise ConfigError(f"{path} is not a key of P-256, P-384 or P-521; make one: {_MAKING}")
    return found


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the key of a file; ConfigError if it has none that signatures are checked with."""
    try:
        found = load_pem_public_key(_content(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a public key in PEM; make one: {_PUBLISHING}") from error
    if not isinstance(found, ec.EllipticCurvePublicKey) or found.curve.name not in _HASHES:
        raise ConfigError(
            f"{path} is not a key of P-256, P-384 or P-521; make one: {_MAKING}; {_PUBLISHING}"
        )
    return found


def hash_of(key: ec.EllipticCurvePublicKey) -> hashes.HashAlgorithm:
    """Return what is hashed with before a key of this curve signs."""
    return _HASHES[key.curve.name]()


def hint_of(key: ec.EllipticCurvePublicKey) -> str:
    """Return by what a signature says which key it is of."""
    return sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from error
