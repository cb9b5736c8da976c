"""The certificates, tokens and ports that a server is made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from server.settings import Settings


@dataclass(frozen=True)
class DoorsConfig:
    """The certificates, tokens and ports of a server."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    admin_port: int | None = None
    admin_tokens: Path | None = None
    reflection: bool = False
    insecure: bool = False


def doors_config(settings: Settings) -> DoorsConfig:
    """Return what settings say of how a server is reached, and by whom."""
    return DoorsConfig(
        tls_cert=settings.tls.cert,
        tls_key=settings.tls.key,
        tls_client_ca=settings.tls.client_ca,
        tokens=settings.auth.tokens,
        admin_port=settings.admin.port,
        admin_tokens=settings.admin.tokens,
        reflection=settings.listen.reflection,
        insecure=settings.auth.insecure,
    )
