"""Settings of the doors: how a server is reached, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from server.hosts import is_loopback
from server.setting_checks import check_port

CERTIFICATES = ("tls_cert", "tls_key", "tls_client_ca")  # the settings of them, as below


@dataclass(frozen=True)
class DoorsConfig:
    """The certificates, tokens and ports of a server; without any, only this machine may call."""

    tls_cert: Path | None = None  # PEM: the server's, then those between it and a root
    tls_key: Path | None = None  # PEM, without a password
    tls_client_ca: Path | None = None  # PEM: clients need a certificate that one of these signed
    tokens: Path | None = None  # TOML; None: nobody is asked for a token
    admin_port: int | None = None  # 0: any that is free; None: nobody can operate the server
    admin_tokens: Path | None = None  # TOML as `tokens`, of those who operate the server
    reflection: bool = False  # whether clients may ask for the descriptions of the services
    insecure: bool = False  # whether other machines may call without certificates and tokens

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                f"tls_cert ({self.tls_cert}) and tls_key ({self.tls_key}) belong together; give "
                "both, or none"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                f"tls_client_ca ({self.tls_client_ca}) needs a certificate of the server too; "
                "give tls_cert and tls_key"
            )
        if self.admin_tokens is not None and self.admin_port is None:
            raise ConfigError(
                f"admin_tokens ({self.admin_tokens}) are for the admin port; give admin_port"
            )
        if self.admin_port is not None:
            check_port(self.admin_port, "admin_port")

    def check_reach(self, host: str) -> None:
        """Raise ConfigError if strangers on other machines could call, read or operate a server."""
        if self.insecure or is_loopback(host):
            return
        needed = {
            "a certificate (--tls-cert, --tls-key)": self.tls_cert,
            "to know who calls (--tokens or --tls-client-ca)": self.tokens or self.tls_client_ca,
        }
        if self.admin_port is not None:
            needed["to know who operates it (--admin-tokens)"] = self.admin_tokens
        missing = [what for what, given in needed.items() if given is None]
        if missing:
            raise ConfigError(
                f"host ({host}) is reached from other machines, so the server needs "
                f"{', and '.join(missing)}; give that, listen on 127.0.0.1, or type --insecure to "
                "let everybody in who can reach it"
            )
