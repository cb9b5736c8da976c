"""Settings of the KServe server."""

from __future__ import annotations

from dataclasses import dataclass

from server.front.config import FrontConfig


@dataclass(frozen=True, kw_only=True)
class KserveConfig(FrontConfig):
    """Where the KServe server listens, and what it takes."""

    port: int = 8001
    max_request_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_request_bytes")
