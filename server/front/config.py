"""Settings of a server in front of ours."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.identity.config import DoorsConfig


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """Where a server in front of ours listens, and what it takes."""

    host: str = "127.0.0.1"
    port: int  # 0: any that is free
    max_requests: int = 1024  # open at once; one more is refused
    timeout: float = 600.0  # seconds of a call of the server behind
    grace: float = 30.0  # seconds that open requests get at the end
    tls: DoorsConfig = field(
        default_factory=DoorsConfig
    )  # its certificate; who calls is asked behind

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port ({self.port}) must be 1 to 65535, or 0 for any that is free")
        self.check_positive("max_requests", "timeout")
        if self.grace < 0:
            raise ValueError(f"grace ({self.grace}) must be 0 or more seconds")

    def check_positive(self, *names: str) -> None:
        """Raise ValueError for a setting that is not more than 0."""
        for name in names:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be more than 0")
