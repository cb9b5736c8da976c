"""Settings of a server in front of ours."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.identity.config import DoorsConfig
from server.setting_checks import (
    check_at_least_one,
    check_not_negative,
    check_port,
    check_positive,
)


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """Where a server in front of ours listens, and what it takes."""

    host: str = "127.0.0.1"
    port: int  # 0: any that is free
    max_requests: int = 1024  # open at once; one more is refused
    timeout: float = 600.0  # seconds of a call of the server behind
    grace: float = 30.0  # seconds that open requests get at the end
    # Its certificate; who calls is asked behind.
    tls: DoorsConfig = field(default_factory=DoorsConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot be."""
        check_port(self.port)
        check_at_least_one(self, "max_requests")
        check_positive(self, "timeout")
        check_not_negative(self, "grace")
