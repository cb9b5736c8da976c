"""Arguments of a worker and of a gateway; both follow from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from server.settings import Admin, Auth, Engine, Limits, Listen, Settings, Tls


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Limits):
    """The limits of a worker, and where it listens."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    health_period: float = Engine.health_period


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Limits, Listen):
    """The limits of a gateway, where it listens, and whose calls it takes."""

    port: int = 0  # 0: any that is free
    # For processes of this machine, which need no certificate there but tokens as everywhere; the
    # admin port's is beside it.
    local_socket: Path | None = None
    logs_workers: bool = False  # log lines of workers are logged here, too
    max_calls_per_worker: int = 32  # handed over at once; more wait at the gateway, in fair order
    tls: Tls = field(default_factory=Tls)
    auth: Auth = field(default_factory=Auth)
    admin: Admin = field(default_factory=Admin)


def worker_config(settings: Settings, host: str) -> WorkerConfig:
    """Return what a worker is made with that listens there, on any port that is free."""
    period = settings.engine.health_period
    return WorkerConfig(**vars(settings.limits), host=host, health_period=period)


def gateway_config(settings: Settings) -> GatewayConfig:
    """Return what a gateway is made with; it takes what its workers take."""
    engine = settings.engine
    return GatewayConfig(
        **vars(settings.limits),
        **vars(settings.listen),
        # A full batch, and so many that another replica is seen to be needed.
        max_calls_per_worker=max(engine.most_num_seqs, int(engine.target_live_requests) + 1),
        tls=settings.tls,
        auth=settings.auth,
        admin=settings.admin,
    )
