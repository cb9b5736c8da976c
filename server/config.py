"""Arguments of a worker and of a gateway; both follow from the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import RequestLimits
from server.auth.config import DoorsConfig, doors_config
from server.settings import MEBIBYTE, Settings


@dataclass(frozen=True)
class WorkerConfig:
    """The address of a worker, and its limits before an engine sees a request."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    max_request_bytes: int = MEBIBYTE
    max_concurrent_calls: int = 1024  # the outer wall; engines refuse earlier
    max_open_bytes: int = 256 * MEBIBYTE  # all open calls together
    limits: RequestLimits = field(default_factory=RequestLimits)  # those of the engines
    health_period: float = 0.5  # seconds between two looks at the engines' health
    client_keepalive_timeout: float = (
        20.0  # seconds; a gateway that leaves a ping unanswered so long is gone
    )


@dataclass(frozen=True)
class GatewayConfig:
    """The address of a gateway, and how long calls wait for a worker."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    # For processes of this machine, which need no certificate there but tokens as everywhere; the
    # admin port's is beside it.
    local_socket: Path | None = None
    worker_wait: float = 10.0  # seconds that a call waits for a worker that takes it
    worker_keepalive_timeout: float = (
        4.0  # seconds; a worker that leaves a ping unanswered so long is lost
    )
    client_keepalive_timeout: float = 20.0  # seconds; the same for clients, whose calls end then
    max_connection_age: float = math.inf  # seconds
    max_calls_per_worker: int = 32  # handed over at once; more wait at the gateway, in fair order
    contended_calls_per_worker: int = 2
    max_request_bytes: int = MEBIBYTE
    prefix_affinity: bool = False
    max_concurrent_calls: int = 4096
    max_open_bytes: int = 256 * MEBIBYTE  # all open calls together
    doors: DoorsConfig = field(default_factory=DoorsConfig)  # authentication


def worker_config(settings: Settings, host: str) -> WorkerConfig:
    """Return what a worker is made with that listens there, on any port that is free."""
    limits = settings.limits
    return WorkerConfig(
        host=host,
        max_request_bytes=limits.max_request_bytes,
        max_concurrent_calls=limits.max_worker_calls,
        max_open_bytes=limits.max_open_bytes,
        limits=limits,
        health_period=settings.engine.health_period,
        client_keepalive_timeout=limits.client_keepalive_timeout,
    )


def gateway_config(settings: Settings) -> GatewayConfig:
    """Return what a gateway is made with; it takes what its workers take."""
    listen, limits, engine = settings.listen, settings.limits, settings.engine
    return GatewayConfig(
        host=listen.host,
        port=listen.port,
        worker_wait=limits.worker_wait,
        worker_keepalive_timeout=limits.worker_keepalive_timeout,
        client_keepalive_timeout=limits.client_keepalive_timeout,
        max_connection_age=listen.max_connection_age,
        # A full batch, and so many that another replica is seen to be needed.
        max_calls_per_worker=max(engine.most_num_seqs, int(engine.target_live_requests) + 1),
        contended_calls_per_worker=limits.contended_calls_per_worker,
        max_request_bytes=limits.max_request_bytes,
        prefix_affinity=listen.prefix_affinity,
        max_concurrent_calls=limits.max_concurrent_calls,
        max_open_bytes=limits.max_open_bytes,
        doors=doors_config(settings),
    )
