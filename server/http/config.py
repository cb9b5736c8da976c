"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpConfig:
    """Where the HTTP server listens, and what it takes."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    max_body_bytes: int = 4 << 20  # of one request
    max_requests: int = 1024  # open at once; one more is refused
    body_seconds: float = 30.0  # for the body of a request to come
    timeout: float = 600.0  # seconds of a call of the server behind
    grace: float = 30.0  # seconds that open requests get at the end

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port ({self.port}) must be 1 to 65535, or 0 for any that is free")
        for name in ("max_body_bytes", "max_requests", "body_seconds", "timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be more than 0")
        if self.grace < 0:
            raise ValueError(f"grace ({self.grace}) must be 0 or more seconds")
