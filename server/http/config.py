"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from server.front.config import FrontConfig


@dataclass(frozen=True, kw_only=True)
class HttpConfig(FrontConfig):
    """Where the HTTP server listens, and what it takes."""

    port: int = 8000
    max_body_bytes: int = 4 << 20  # of one request
    body_seconds: float = 30.0  # for the body of a request to come

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_body_bytes", "body_seconds")
