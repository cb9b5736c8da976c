"""The certificate that a gateway and its workers have in common, and nobody else has."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import grpc

from server.hosts import is_loopback

NAME = "tokenweir-peer"  # in the certificate, whatever the addresses are
_YEARS = 10  # longest life of a service
_CLOCKS_APART = timedelta(days=1)  # on the machines of a cluster, at most


@dataclass(frozen=True)
class InternalCertificate:
    """A certificate that signs itself: its presenter has its key, and belongs to the service."""

    cert: bytes  # PEM
    key: bytes = field(repr=False)  # PEM

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a port that takes calls by it only."""
        pair = (self.key, self.cert)
        return grpc.ssl_server_credentials([pair], self.cert, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of calls to such a port; `CHANNEL_OPTIONS` belong to them."""
        return grpc.ssl_channel_credentials(self.cert, self.key, self.cert)


CHANNEL_OPTIONS = (("grpc.ssl_target_name_override", NAME), ("grpc.default_authority", NAME))


def internal_certificate(host: str) -> InternalCertificate | None:
    """Return a new one for a service on a host that others reach; None on the loopback interface.

    It needs the distribution cryptography.
    """
    if is_loopback(host):
        return None
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return InternalCertificate(certificate.public_bytes(Encoding.PEM), private)
