"""Arguments of the adapters of other protocols."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from server.settings import Http, Kserve, Settings, Tls


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The address of an adapter, and how it ends."""

    host: str = "127.0.0.1"
    grace: float = 30.0  # seconds that open requests get at the end
    # Its certificate; callers are authenticated by the server behind.
    tls: Tls = field(default_factory=Tls)


@dataclass(frozen=True, kw_only=True)
class HttpConfig(Http, AdapterConfig):
    """The address of the HTTP server, and its limits."""

    port: int = 8000
    # The admin port's, if it asks for one; readers of the load on the page show it too.
    admin_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class KserveConfig(Kserve, AdapterConfig):
    """The address of the KServe server, and its limits."""


def http_config(settings: Settings, admin_token: str | None) -> HttpConfig:
    """Return what an HTTP server is made with, beside a gateway or by itself."""
    port = HttpConfig.port if settings.http.port is None else settings.http.port
    own = {**vars(settings.http), **_place(settings), "port": port}
    return HttpConfig(**own, admin_token=admin_token)


def kserve_config(settings: Settings) -> KserveConfig:
    """Return what a KServe server is made with."""
    return KserveConfig(**vars(settings.kserve), **_place(settings))


def _place(settings: Settings) -> dict[str, Any]:
    listen = settings.listen
    return {"host": listen.host, "grace": listen.grace, "tls": settings.tls}
