"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.front.config import FrontConfig
from server.setting_checks import check_at_least_one, check_positive


@dataclass(frozen=True, kw_only=True)
class HttpConfig(FrontConfig):
    """Where the HTTP server listens, and what it takes."""

    port: int = 8000
    max_body_bytes: int = 4 << 20  # of one request
    body_seconds: float = 30.0  # for the body of a request to come
    head_seconds: float = 10.0  # for what stands before it
    max_head_bytes: int = 64 << 10
    # Of the admin port, if it asks for one: who reads the load on the page shows it too.
    admin_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "max_body_bytes", "max_head_bytes")
        check_positive(self, "body_seconds", "head_seconds")
