"""A signature over a package in the format of OpenSSF's model-signing, by a key.

`model.sig` is a Sigstore bundle: a DSSE envelope around an in-toto statement that has the SHA-256
of the manifest and of every file. `model_signing verify key` reads what is written here, and what
`model_signing sign key` writes is read here. The library itself hashes a whole directory, and a
package is refused before its files are fetched.

https://github.com/sigstore/model-transparency, https://github.com/secure-systems-lab/dsse,
https://docs.sigstore.dev/about/bundle
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from engine.errors import PackageError
from engine.package.manifest import Manifest
from engine.package.package import MANIFEST_NAME, SIGNATURE_NAME, load_package
from engine.wording import problems_of
from server.packages.signing_key import hash_of, hint_of, private_key

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"


class _OneSignature(BaseModel):
    sig: Base64Bytes


class _Envelope(BaseModel):
    payload: Base64Bytes
    payload_type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType")
    signatures: list[_OneSignature] = Field(min_length=1, max_length=1)


class _Bundle(BaseModel):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"] = Field(alias="mediaType")
    envelope: _Envelope = Field(alias="dsseEnvelope")


class _Resource(BaseModel):
    name: str
    digest: str


class _Predicate(BaseModel):
    resources: list[_Resource]


class _Statement(BaseModel):
    kind: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = Field(alias="predicateType")
    predicate: _Predicate


def sign(package: Path, key: Path) -> Path:
    """Write the signature of a package into its directory; return its path.

    Raises ConfigError for a key that cannot be used, PackageError for what is no package, or one
    that is damaged.
    """
    private = private_key(key)
    checked = load_package(package)
    digests = _digests(checked.manifest_sha256.hex(), checked.manifest)
    payload = json.dumps(_statement(checked.path.name, digests)).encode()
    path = checked.path / SIGNATURE_NAME
    whole = checked.path.parent / f".{checked.path.name}.{SIGNATURE_NAME}-{os.getpid()}"
    try:
        whole.write_text(json.dumps(_bundle(payload, private)))
        whole.replace(path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error}") from error
    finally:
        whole.unlink(missing_ok=True)
    return path


def check_signature(
    signature: bytes, key: ec.EllipticCurvePublicKey, raw: bytes, manifest: Manifest, place: str
) -> None:
    """Raise PackageError if the key has not signed the manifest with these bytes, and its files."""
    try:
        envelope = _Bundle.model_validate_json(signature).envelope
        key.verify(envelope.signatures[0].sig, _signed_bytes(envelope.payload), _scheme(key))
        signed = _Statement.model_validate_json(envelope.payload).predicate.resources
    except ValidationError as error:
        raise PackageError(
            f"{place}: {SIGNATURE_NAME} is not a signature by a key as model-signing 1 writes it: "
            f"{problems_of(error, SIGNATURE_NAME)}; sign the package again"
        ) from error
    except InvalidSignature as error:
        raise PackageError(
            f"{place}: {SIGNATURE_NAME} is not by the required key: another key has signed the "
            "package, or the signature was changed since"
        ) from error
    found = {resource.name: resource.digest for resource in signed}
    for name, digest in _digests(sha256(raw).hexdigest(), manifest).items():
        if found.get(name) != digest:
            raise PackageError(
                f"{place}: {name} is not what {SIGNATURE_NAME} has signed; the package was changed "
                "since, sign it again"
            )


def _digests(manifest_sha256: str, manifest: Manifest) -> dict[str, str]:
    """Return the SHA-256 of every file in the order of their names, as the format has them."""
    files = {name: entry.sha256 for name, entry in manifest.files.items()}
    return dict(sorted({**files, MANIFEST_NAME: manifest_sha256}.items()))


def _statement(name: str, digests: Mapping[str, str]) -> dict[str, object]:
    whole = sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": whole}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [SIGNATURE_NAME],
            },
            "resources": [
                {"name": file, "algorithm": "sha256", "digest": digest}
                for file, digest in digests.items()
            ],
        },
    }


def _bundle(payload: bytes, key: ec.EllipticCurvePrivateKey) -> dict[str, object]:
    signature = key.sign(_signed_bytes(payload), _scheme(key.public_key()))
    return {
        "mediaType": _BUNDLE,
        "verificationMaterial": {
            "publicKey": {"hint": hint_of(key.public_key())},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }


def _scheme(key: ec.EllipticCurvePublicKey) -> ec.ECDSA:
    return ec.ECDSA(hash_of(key))


def _signed_bytes(payload: bytes) -> bytes:
    """Return the "pre-authentication encoding" of DSSE, which is what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)
