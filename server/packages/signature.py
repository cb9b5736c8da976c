"""A detached signature over the manifest of a package, which has the hash of every file.

`manifest.sig` is what `openssl dgst -sha256 -sign key.pem manifest.json` writes: ECDSA over SHA-256
(FIPS 186-5), in DER.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from engine.errors import ConfigError, PackageError
from engine.package.package import MANIFEST_NAME, SIGNATURE_NAME, load_package

MAX_SIGNATURE_BYTES = 1024  # those of P-521 have 141

_ECDSA = ec.ECDSA(SHA256())
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_KEY_BYTES = 1 << 16
_MAKING = "openssl ecparam -genkey -noout -name prime256v1 -out key.pem"
_PUBLISHING = "openssl pkey -in key.pem -pubout -out key.pub"


def sign(package: Path, key: Path) -> Path:
    """Write the signature of a package into its directory; return its path.

    Raises ConfigError for a key that cannot be used, PackageError for what is no package, or one
    that is damaged.
    """
    private = _key(key, lambda pem: load_pem_private_key(pem, password=None))
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.curve.name not in _CURVES:
        raise ConfigError(
            f"{key} is not a private key in PEM without a password, on P-256, P-384 or P-521; "
            f"make one: {_MAKING}"
        )
    directory = load_package(package).path
    path = directory / SIGNATURE_NAME
    whole = directory.parent / f".{directory.name}.{SIGNATURE_NAME}-{os.getpid()}"
    try:
        whole.write_bytes(private.sign((directory / MANIFEST_NAME).read_bytes(), _ECDSA))
        whole.replace(path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error}") from error
    finally:
        whole.unlink(missing_ok=True)
    return path


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the key of a file; ConfigError if it has none that signatures are checked with."""
    found = _key(path, load_pem_public_key)
    if not isinstance(found, ec.EllipticCurvePublicKey) or found.curve.name not in _CURVES:
        raise ConfigError(
            f"{path} is not a public key in PEM on P-256, P-384 or P-521; make one: {_MAKING}; "
            f"{_PUBLISHING}"
        )
    return found


def check_signature(
    signature: bytes, key: ec.EllipticCurvePublicKey, manifest: bytes, place: str
) -> None:
    """Raise PackageError if the key has not signed these bytes of a manifest."""
    try:
        key.verify(signature, manifest, _ECDSA)
    except InvalidSignature as error:
        raise PackageError(
            f"{place}: {SIGNATURE_NAME} is not the required key's signature of {MANIFEST_NAME}: "
            "another key has signed it, or the package was changed since; sign it again"
        ) from error


def _key(path: Path, load: Callable[[bytes], object]) -> object:
    """Return the key of a file, None if it has none."""
    try:
        with path.open("rb") as file:
            return load(file.read(_MAX_KEY_BYTES))
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):  # TypeError: it has a password
        return None
