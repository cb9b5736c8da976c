"""Certificates that a test makes for itself."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates of 127.0.0.1 and localhost, for servers and for clients."""

    def __init__(self, name: str = "a test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        is_root = x509.BasicConstraints(ca=True, path_length=None)
        self.pem = _pem(
            _builder(self._name, self._name, self._key)
            .add_extension(is_root, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def certify(self, name: str = "localhost", days: int = 1) -> Certified:
        """Return a certificate, for so many days from now, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), address])
        certificate = (
            _builder(subject, self._name, key, days)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Certified(_pem(certificate), private)


@dataclass(frozen=True)
class Certified:
    """A certificate and its key, PEM."""

    cert: bytes
    key: bytes

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both; return their paths."""
        cert, key = folder / "cert.pem", folder / "key.pem"
        cert.write_bytes(self.cert)
        key.write_bytes(self.key)
        return cert, key

    def with_password(self, password: bytes) -> bytes:
        """Return the key as only who has the password can read it."""
        key = load_pem_private_key(self.key, None)
        return key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
        )

    def of_client(self, authority: Authority) -> grpc.ChannelCredentials:
        """Return credentials of who shows this, and trusts an authority."""
        return grpc.ssl_channel_credentials(authority.pem, self.key, self.cert)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
