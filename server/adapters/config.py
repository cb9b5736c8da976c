"""Arguments of the adapters of other protocols."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.settings import Http, Kserve, Listen, Settings, Tls


@dataclass(frozen=True, kw_only=True)
class HttpConfig(Http, Listen):
    """The address of the HTTP server, its limits, and how it ends."""

    port: int = 8000
    tls: Tls = field(default_factory=Tls)  # callers are authenticated by the server behind
    # The admin port's, if it asks for one; readers of the load on the page show it too.
    admin_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class KserveConfig(Kserve, Listen):
    """The address of the KServe server, its limits, and how it ends."""

    tls: Tls = field(default_factory=Tls)  # as of HTTP


def http_config(settings: Settings, admin_token: str | None) -> HttpConfig:
    """Return what an HTTP server is made with, beside a gateway or by itself."""
    port = HttpConfig.port if settings.http.port is None else settings.http.port
    own = {**vars(settings.listen), **vars(settings.http), "port": port}
    return HttpConfig(**own, tls=settings.tls, admin_token=admin_token)


def kserve_config(settings: Settings) -> KserveConfig:
    """Return what a KServe server is made with."""
    own = {**vars(settings.listen), **vars(settings.kserve)}
    return KserveConfig(**own, tls=settings.tls)
