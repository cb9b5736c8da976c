"""Settings of the servers in front of ours, which speak other protocols: sections of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Self

from engine.errors import ConfigError
from server.identity.config import DoorsConfig
from server.setting_checks import (
    check_at_least_one,
    check_not_negative,
    check_port,
    check_positive,
)

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/A-Z]+")


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """The address of a server in front of ours, and its limits."""

    host: str = "127.0.0.1"
    port: int  # 0: any that is free
    max_requests: int = 1024  # open at once; one more is refused
    timeout: float = 600.0  # seconds of a call of the server behind
    grace: float = 30.0  # seconds that open requests get at the end
    # Its certificate; callers are authenticated by the server behind.
    tls: DoorsConfig = field(default_factory=DoorsConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot be."""
        check_port(self.port)
        check_at_least_one(self, "max_requests")
        check_positive(self, "timeout")
        check_not_negative(self, "grace")

    def beside(self, host: str, grace: float, doors: DoorsConfig) -> Self:
        """Return the settings of one that listens as a gateway does, with its certificates."""
        tls = DoorsConfig(
            tls_cert=doors.tls_cert, tls_key=doors.tls_key, tls_client_ca=doors.tls_client_ca
        )
        return replace(self, host=host, grace=grace, tls=tls)


@dataclass(frozen=True, kw_only=True)
class HttpConfig(FrontConfig):
    """The address of the HTTP server, and its limits."""

    port: int = 8000
    max_body_bytes: int = 4 << 20  # per request
    body_seconds: float = 30.0  # for the body of a request to come
    head_seconds: float = 10.0  # for what stands before it
    max_head_bytes: int = 64 << 10
    keep_alive_seconds: float = 75.0  # a connection without a request; more than proxies wait
    ping_seconds: float = 1.0  # silence in a stream before a comment is sent
    allowed_origins: tuple[str, ...] = ()  # sites whose pages may ask; "*": all
    # The admin port's, if it asks for one; readers of the load on the page show it too.
    admin_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "max_body_bytes", "max_head_bytes")
        check_positive(self, "body_seconds", "head_seconds", "keep_alive_seconds", "ping_seconds")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins ({origin}) must be as browsers send them, as "
                    "https://chat.example, without a slash at the end, or *"
                )


@dataclass(frozen=True, kw_only=True)
class KserveConfig(FrontConfig):
    """The address of the KServe server, and its limits."""

    port: int = 8001
    max_request_bytes: int = 16 << 20
    max_open_bytes: int = 256 << 20  # all open requests together

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "max_request_bytes", "max_open_bytes")
