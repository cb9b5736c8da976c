"""Settings of the worker, the gateway and the deployment that joins them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from engine.config import DEFAULT_NUM_SEQS, Device, EngineConfig, RequestLimits
from engine.errors import ConfigError
from server.front_config import HttpConfig
from server.hosts import is_loopback
from server.identity.config import DoorsConfig
from server.setting_checks import (
    check_at_least_one,
    check_not_negative,
    check_port,
    check_positive,
)

MEBIBYTE = 1 << 20
MOST_REQUEST_BYTES = 64 * MEBIBYTE
_BESIDE_AN_IMAGE = MEBIBYTE // 16  # bytes of a request
_ALL = frozenset(("0.0.0.0", "::"))  # addresses of this machine

# Settings that follow from others, and from which: whoever serves sets those.
FOLLOWING: Mapping[str, str] = MappingProxyType(
    {
        "worker.host": "the address of its node",
        "worker.port": "what is free there",
        "worker.limits": "engine.limits",
        "gateway.host": "serve.host",
        "gateway.port": "serve.port",
        "gateway.local_socket": "serve.http_port",
        "gateway.max_request_bytes": "worker.max_request_bytes",
        "gateway.max_calls_per_worker": "engine.max_num_seqs and serve.target_live_requests",
        "http.host": "serve.host",
        "http.port": "serve.http_port",
        "http.grace": "serve.grace",
        "http.tls": "gateway.doors",
        "http.admin_token": "TOKENWEIR_ADMIN_TOKEN",
        "kserve.host": "serve.host",
        "kserve.grace": "serve.grace",
        "kserve.tls": "gateway.doors",
    }
)


@dataclass(frozen=True)
class WorkerConfig:
    """The address of a worker, and its limits before an engine sees a request."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    # Up to 64 MiB. If models take images, the default is raised to the largest of them.
    max_request_bytes: int = MEBIBYTE
    max_concurrent_calls: int = 1024  # the outer wall; engines refuse earlier
    max_open_bytes: int = 256 * MEBIBYTE  # all open calls together
    limits: RequestLimits = field(default_factory=RequestLimits)  # those of the engines
    health_period: float = 0.5  # seconds between two looks at the engines' health
    client_silence: float = 20.0  # seconds; a gateway that leaves a ping unanswered so long is gone

    def __post_init__(self) -> None:
        check_port(self.port)
        _check_walls(self)
        check_positive(self, "health_period", "client_silence")


@dataclass(frozen=True)
class GatewayConfig:
    """The address of the gateway, and how long calls wait for a worker."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    # For processes of this machine, which need no certificate there but tokens as everywhere; the
    # admin port's is beside it.
    local_socket: Path | None = None
    worker_wait: float = 10.0  # seconds that a call waits for a worker that takes it
    worker_silence: float = 4.0  # seconds; a worker that leaves a ping unanswered so long is lost
    client_silence: float = 20.0  # seconds; the same for clients, whose calls end then
    # Seconds until clients are told to connect anew, and so to find other gateways; what runs on a
    # connection ends there. inf: never.
    max_connection_age: float = math.inf
    max_calls_per_worker: int = 32  # handed over at once; more wait at the gateway, in fair order
    # The part for tenants that have calls waiting while another has none: a higher value raises the
    # throughput of those tenants, and the latency of the other's calls.
    crowded_calls_per_worker: int = 2
    max_request_bytes: int = MEBIBYTE
    # Whether a prompt goes to the worker that last had one with the same beginning, if that has not
    # much more to do than others.
    prefix_affinity: bool = False
    max_concurrent_calls: int = 4096
    max_open_bytes: int = 256 * MEBIBYTE  # all open calls together
    doors: DoorsConfig = field(default_factory=DoorsConfig)  # authentication

    def __post_init__(self) -> None:
        check_port(self.port)
        _check_walls(self)
        check_at_least_one(self, "max_calls_per_worker", "crowded_calls_per_worker")
        check_positive(self, "worker_wait", "worker_silence", "client_silence")
        if not self.max_connection_age > 0:
            raise ConfigError(
                f"max_connection_age ({self.max_connection_age}) must be above 0 seconds, or inf"
            )


@dataclass(frozen=True)
class LogConfig:
    """Log settings of a server's processes, which all write to the standard error of `serve`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = True  # a line for every request, at level info


@dataclass(frozen=True)
class MetricsConfig:
    """The port where Prometheus reads the metrics, with an operator's token if there are any."""

    port: int | None = None  # 0: any that is free; None: nothing is counted for it
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.port is not None:
            check_port(self.port)

    def check_reach(self, doors: DoorsConfig) -> None:
        """Raise ConfigError if strangers on other machines could read the metrics."""
        if self.port is None or doors.insecure or is_loopback(self.host):
            return
        needed = {
            "a certificate (--tls-cert, --tls-key)": doors.tls_cert,
            "to know who reads them (--admin-tokens, with --admin-port)": doors.admin_tokens,
        }
        missing = [what for what, given in needed.items() if given is None]
        if missing:
            raise ConfigError(
                f"metrics.host ({self.host}) is reached from other machines, so the metrics need "
                f"{', and '.join(missing)}; give that, leave out --metrics-host, or type "
                "--insecure to let everybody in who can reach it"
            )


@dataclass(frozen=True)
class TracingConfig:
    """The endpoint for spans of calls; its credentials are in OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str | None = None  # OTLP over HTTP, such as http://127.0.0.1:4318
    sample_ratio: float = 1.0  # share of the calls whose client does not decide it

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"endpoint ({self.endpoint}) must be a URL, such as http://127.0.0.1:4318"
            )
        if not 0 <= self.sample_ratio <= 1:
            raise ConfigError(f"sample_ratio ({self.sample_ratio}) must be 0, none, to 1, all")


@dataclass(frozen=True)
class ServeConfig:
    """Settings of `tokenweir serve`: packages, replicas, and the gateway before them."""

    # Name under which a model is served -> its package: a directory, or a URL that is fetched.
    packages: Mapping[str, Path | str]
    host: str = "127.0.0.1"  # the gateway's
    port: int = 50051  # the gateway's; 0: any that is free
    http_port: int | None = None  # OpenAI's protocol, by a process of its own; None: not answered
    min_replicas: int = 1
    max_replicas: int = 1
    target_live_requests: float = 16.0  # per replica; more and another one is started
    downscale_delay: float = 30.0  # seconds of low load before a replica is stopped
    # That Ray reserves for a replica, 0 to 1; None: 1 if a package runs on one, else 0.
    num_gpus_per_replica: float | None = None
    with_gateway: bool = True  # or workers only, on a cluster where gateways run by themselves
    grace: float = 30.0  # seconds that running requests get when a replica or the server stops
    name: str = "tokenweir"  # the service's; two on one cluster need two names
    # A node's cache of fetched packages; None: tokenweir/packages in the user's cache folder
    package_cache: Path | None = None
    require_signature: Path | None = None  # PEM: public key that has to have signed every manifest
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)  # its address: above
    http: HttpConfig = field(default_factory=HttpConfig)  # its address: above
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        check_port(self.port)
        check_port(self.http_port or 0, "http_port")
        check_at_least_one(self, "min_replicas", "max_replicas")
        if math.isinf(self.target_live_requests):
            raise ConfigError("target_live_requests (inf) must be a number; 1e6 adds no replica")
        check_positive(self, "target_live_requests")
        check_not_negative(self, "downscale_delay", "grace")
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError(
                f"name ({self.name!r}) may have letters, digits, '_', '.' and '-' only"
            )
        if self.http_port is not None and not self.with_gateway:
            raise ConfigError(
                f"http_port ({self.http_port}) needs the gateway; leave it out, and run "
                "`tokenweir http` beside a gateway"
            )
        if not self.packages:
            raise ConfigError("packages is empty; name at least one package to serve")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas ({self.max_replicas}) must be at least "
                f"min_replicas ({self.min_replicas})"
            )
        gpus = self.num_gpus_per_replica
        if gpus is not None and not 0 <= gpus <= 1:
            raise ConfigError(
                f"num_gpus_per_replica ({gpus}) must be 0 to 1, for an engine uses one GPU; "
                "0.5 lets two replicas share it"
            )
        self._check_worker()
        self._check_gateway()
        self._check_http()
        self.gateway.doors.check_reach(self.host)
        self.metrics.check_reach(self.gateway.doors)

    @property
    def gateway_settings(self) -> GatewayConfig:
        """All settings of the gateway; it takes what its workers take."""
        return replace(
            self.gateway,
            host=self.host,
            port=self.port,
            max_request_bytes=self.worker.max_request_bytes,
            # A full batch, and so many that another replica is seen to be needed.
            max_calls_per_worker=max(self.engine.most_num_seqs, int(self.target_live_requests) + 1),
        )

    @property
    def http_settings(self) -> HttpConfig:
        """All settings of the HTTP server, which listens as the gateway does."""
        http = self.http.beside(self.host, self.grace, self.gateway.doors)
        return replace(http, port=self.http_port or 0)

    def worker_settings(self, host: str) -> WorkerConfig:
        """Return all settings of a worker that listens there, on any port that is free."""
        return replace(self.worker, host=host, port=0, limits=self.engine.limits)

    @property
    def replicas_per_gpu(self) -> int:
        """How many replicas share a GPU."""
        gpus = self.num_gpus_per_replica or 1.0
        return int(1 / gpus + 1e-6)  # a third of one, as a person writes it, is less

    def settled(self, targets: Iterable[Device]) -> ServeConfig:
        """Return the settings with what follows from the targets of the packages, one each.

        The engines' part of a GPU is divided among those that share it. Raises ConfigError if
        a package cannot run on the device that was asked for.
        """
        on_gpu = [self.engine.device_for(target) for target in targets].count("cuda")
        if not on_gpu:
            engine = self.engine.with_num_seqs(DEFAULT_NUM_SEQS)
            return replace(self, engine=engine, num_gpus_per_replica=self.num_gpus_per_replica or 0)
        if self.num_gpus_per_replica == 0:
            raise ConfigError(
                "num_gpus_per_replica (0) leaves the workers without the GPU that they run on; "
                "leave it out, or set device to cpu"
            )
        share = self.engine.gpu_memory_utilization / (self.replicas_per_gpu * on_gpu)
        return replace(
            self,
            engine=replace(self.engine, gpu_memory_utilization=share),
            num_gpus_per_replica=self.num_gpus_per_replica or 1,
        )

    def with_room_for_images(self) -> ServeConfig:
        """Return the settings with requests that have room for the largest image.

        Raises ConfigError for limits by which such an image never gets to its model.
        """
        largest, most = self.engine.limits.max_image_bytes, self.worker.max_request_bytes
        needed = largest + _BESIDE_AN_IMAGE
        if most == WorkerConfig.max_request_bytes and needed <= MOST_REQUEST_BYTES:
            return replace(self, worker=replace(self.worker, max_request_bytes=max(most, needed)))
        if needed > most:
            raise ConfigError(
                f"engine.limits.max_image_bytes ({largest}) can never be reached, for "
                f"worker.max_request_bytes is {most} (at most {MOST_REQUEST_BYTES}); lower the "
                f"one, or raise the other to at least {needed}"
            )
        return self

    def _check_worker(self) -> None:
        """Refuse what the deployment would overwrite."""
        defaults = WorkerConfig()
        if (self.worker.host, self.worker.port) != (defaults.host, defaults.port):
            raise ConfigError(
                f"worker.host and worker.port ({self.worker.host}:{self.worker.port}) are chosen "
                "where the worker runs; leave them out, and set host and port of the gateway"
            )
        if self.worker.limits not in (defaults.limits, self.engine.limits):
            raise ConfigError("worker.limits differ from engine.limits; set engine.limits alone")

    def _check_gateway(self) -> None:
        """Refuse what `gateway_settings` would overwrite."""
        given, defaults = self.gateway, GatewayConfig()
        if (given.host, given.port) != (defaults.host, defaults.port):
            raise ConfigError(
                f"gateway.host and gateway.port ({given.host}:{given.port}) are those of the "
                "server; leave them out, and set host and port"
            )
        if given.max_request_bytes not in (
            defaults.max_request_bytes,
            self.worker.max_request_bytes,
        ):
            raise ConfigError(
                f"gateway.max_request_bytes ({given.max_request_bytes}) is the worker's; "
                "set worker.max_request_bytes alone"
            )
        self._check_ports()
        if given.max_calls_per_worker != defaults.max_calls_per_worker:
            raise ConfigError(
                f"gateway.max_calls_per_worker ({given.max_calls_per_worker}) follows from others; "
                "set engine.max_num_seqs and target_live_requests"
            )

    def _check_http(self) -> None:
        """Refuse what `http_settings` would overwrite."""
        given, defaults = self.http, HttpConfig()
        for name in ("host", "port", "grace", "tls", "admin_token"):
            if getattr(given, name) != getattr(defaults, name):
                source = FOLLOWING[f"http.{name}"]
                raise ConfigError(f"http.{name} follows from {source}; leave it out, and set that")

    def _check_ports(self) -> None:
        """Refuse two services on one port."""
        is_shared = self.metrics.host == self.host or _ALL & {self.metrics.host, self.host}
        ports = {
            "port": self.port,
            "http_port": self.http_port,
            "admin_port": self.gateway.doors.admin_port,
            "metrics.port": self.metrics.port if is_shared else None,
        }
        names: dict[int, str] = {}
        for name, port in ports.items():
            if port and port in names:
                raise ConfigError(
                    f"{names[port]} and {name} are both {port}; give one of them another port"
                )
            if port:
                names[port] = name


@dataclass(frozen=True)
class GatewayRoleConfig:
    """Settings of `tokenweir gateway`: a gateway of its own before the workers of a service."""

    ray_address: str  # host:port of the cluster that the service runs on
    name: str = "tokenweir"  # the service's
    grace: float = 30.0  # seconds that running requests get when the gateway stops
    # The limits of requests follow from the service.
    gateway: GatewayConfig = field(default_factory=lambda: GatewayConfig(prefix_affinity=True))
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        check_not_negative(self, "grace")
        if not re.fullmatch(r"[^/]+:\d+", self.ray_address):
            raise ConfigError(
                f"ray_address ({self.ray_address}) must be HOST:PORT of the cluster's head, such "
                "as 10.0.0.1:6379"
            )
        self.gateway.doors.check_reach(self.gateway.host)
        self.metrics.check_reach(self.gateway.doors)


def _check_walls(config: WorkerConfig | GatewayConfig) -> None:
    check_at_least_one(config, "max_request_bytes", "max_concurrent_calls", "max_open_bytes")
    if config.max_request_bytes > MOST_REQUEST_BYTES:
        raise ConfigError(
            f"max_request_bytes ({config.max_request_bytes}) must be at most {MOST_REQUEST_BYTES}, "
            "64 MiB; send larger images in a smaller size"
        )
