"""Settings of the KServe server."""

from __future__ import annotations

from dataclasses import dataclass

from server.front.config import FrontConfig
from server.setting_checks import check_at_least_one


@dataclass(frozen=True, kw_only=True)
class KserveConfig(FrontConfig):
    """Where the KServe server listens, and what it takes."""

    port: int = 8001
    max_request_bytes: int = 16 << 20
    max_open_bytes: int = 256 << 20  # of the requests that are open

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "max_request_bytes", "max_open_bytes")
