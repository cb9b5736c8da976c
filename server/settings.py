"""All that a person may set of a server: one tree, whose fields have their help and option.

A file of settings is TOML with these sections. Options of commands, `--print-config` and the page
`docs/reference/settings.md` are made of the tree; what the parts of a server are made with is
derived from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.config import DEFAULT_NUM_SEQS, Device, EngineConfig, RequestLimits
from engine.errors import ConfigError
from engine.setting import FINITE, setting
from server.hosts import is_loopback

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

MEBIBYTE = 1 << 20
MOST_REQUEST_BYTES = 64 * MEBIBYTE
MAX_REPLICAS = 1024
_BESIDE_AN_IMAGE = MEBIBYTE // 16  # bytes of a request
_ALL = frozenset(("0.0.0.0", "::"))  # addresses of this machine
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/A-Z]+")
_PORT: Mapping[str, Any] = {"ge": 0, "le": 65535}
_MOST_SECONDS = 1_000_000  # 11 days; gRPC counts milliseconds, with 31 bits
_TIME: Mapping[str, Any] = {"le": _MOST_SECONDS, **FINITE, "metavar": "SECONDS"}
_SECONDS: Mapping[str, Any] = {"gt": 0, **_TIME}
_SECONDS_OR_NONE: Mapping[str, Any] = {"ge": 0, **_TIME}
_REPLICAS: Mapping[str, Any] = {"ge": 1, "le": MAX_REPLICAS}


@dataclass(frozen=True)
class Listen:
    """The address of the service, and how it ends."""

    host: str = setting("127.0.0.1", "Interface to listen on.", option="--host")
    port: int = setting(50051, "Port of the gateway; 0: any free one.", option="--port", **_PORT)
    name: str = setting(
        "tokenweir", "Name of the service; two on one Ray cluster need two.", option="--name"
    )
    gateway: bool = setting(
        True,
        "Run a gateway, or workers only, for gateways of `tokenweir gateway` on a Ray cluster.",
        option="--gateway/--no-gateway",
    )
    grace: float = setting(
        30.0,
        "Time for requests in flight to finish at SIGTERM or Ctrl-C.",
        option="--grace",
        **_SECONDS_OR_NONE,
    )
    prefix_affinity: bool = setting(
        False,
        "Send a prompt to the worker that last had one with the same beginning, while others have "
        "about as much to do.",
        option="--prefix-affinity/--no-prefix-affinity",
    )
    max_connection_age: float = setting(
        math.inf,
        "Seconds until clients are told to connect again, and so to find other gateways; what runs "
        "on a connection ends there. inf: never.",
        gt=0,
    )
    reflection: bool = setting(
        False, "Describe the services to clients that ask for it.", option="--reflection"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError(
                f"listen.name ({self.name!r}) may have letters, digits, '_', '.' and '-' only"
            )


@dataclass(frozen=True)
class Tls:
    """Certificates."""

    cert: Path | None = setting(
        None,
        "Accept TLS only, with this certificate; it is read again when the file changes.",
        option="--tls-cert",
        metavar="PEM",
    )
    key: Path | None = setting(
        None, "Key of the certificate, without a password.", option="--tls-key", metavar="PEM"
    )
    client_ca: Path | None = setting(
        None,
        "Accept only clients whose certificate one of these has signed.",
        option="--tls-client-ca",
        metavar="PEM",
    )

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(
                f"tls.cert ({self.cert}) and tls.key ({self.key}) belong together; give both, or "
                "none"
            )
        if self.client_ca is not None and self.cert is None:
            raise ConfigError(
                f"tls.client_ca ({self.client_ca}) needs a certificate of the server too; give "
                "tls.cert and tls.key"
            )


@dataclass(frozen=True)
class Auth:
    """Authentication of clients."""

    tokens: Path | None = setting(
        None,
        "Accept only calls with a token of this file; `tokenweir token` makes one.",
        option="--tokens",
        metavar="TOML",
    )
    insecure: bool = setting(
        False,
        "Allow other machines to call without TLS or authentication.",
        option="--insecure",
    )


@dataclass(frozen=True)
class Admin:
    """The port for operators."""

    port: int | None = setting(
        None,
        "Port for operators; 0: any free one.",
        option="--admin-port",
        unset="none",
        **_PORT,
    )
    tokens: Path | None = setting(
        None,
        "Accept only calls at the admin port with a token of this file.",
        option="--admin-tokens",
        metavar="TOML",
    )

    def __post_init__(self) -> None:
        if self.tokens is not None and self.port is None:
            raise ConfigError(
                f"admin.tokens ({self.tokens}) are for the admin port; give admin.port"
            )


@dataclass(frozen=True, kw_only=True)
class Http:
    """OpenAI's and KServe's protocols over HTTP, and a page for people."""

    port: int | None = setting(
        None,
        "Port of OpenAI's and KServe's protocols over HTTP, and of a page; 0: any free one.",
        option="--http-port",
        unset="none",
        **_PORT,
    )
    timeout: float = setting(
        600.0,
        "Deadline of a request, waiting included.",
        option="--timeout",
        **_SECONDS,
    )
    max_requests: int = setting(1024, "Requests open at once; one more is refused.", ge=1)
    max_body_bytes: int = setting(
        4 << 20, "Bytes of a request; a longer one is refused.", option="--max-body-bytes", ge=1
    )
    body_seconds: float = setting(
        30.0, "Time in which the body of a request must arrive.", **_SECONDS
    )
    head_seconds: float = setting(
        10.0, "Time in which the head of a request must arrive.", **_SECONDS
    )
    max_head_bytes: int = setting(64 << 10, "Bytes of the head of a request.", ge=1)
    keep_alive_seconds: float = setting(
        75.0,
        "Time that an idle connection is kept; proxies should keep theirs for less.",
        **_SECONDS,
    )
    ping_seconds: float = setting(1.0, "Silence in a stream before a comment is sent.", **_SECONDS)
    allowed_origins: tuple[str, ...] = setting(
        (), 'Sites whose pages may call, as https://chat.example; "*": all.'
    )

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"http.allowed_origins ({origin}) must be as browsers send them, as "
                    "https://chat.example, without a slash at the end, or *"
                )


@dataclass(frozen=True, kw_only=True)
class Kserve:
    """KServe's protocol over gRPC, of `tokenweir kserve`."""

    port: int = setting(8001, "Port to listen on; 0: any free one.", option="--port", **_PORT)
    timeout: float = setting(
        600.0, "Deadline of a request, waiting included.", option="--timeout", **_SECONDS
    )
    max_requests: int = setting(1024, "Requests open at once; one more is refused.", ge=1)
    max_request_bytes: int = setting(
        16 << 20,
        "Bytes of a request; a longer one is refused.",
        option="--max-request-bytes",
        ge=1,
        le=(1 << 31) - 1,  # gRPC's
    )
    max_open_bytes: int = setting(256 << 20, "Bytes of all open requests together.", ge=1)


@dataclass(frozen=True)
class Limits(RequestLimits):
    """The most that clients may ask for, and timeouts."""

    max_request_bytes: int = setting(
        MEBIBYTE,
        "Largest request in bytes. If unset and a model takes images, raised to fit the largest "
        "image.",
        ge=1,
        le=MOST_REQUEST_BYTES,
    )
    max_concurrent_calls: int = setting(4096, "Calls open at a gateway; one more is refused.", ge=1)
    max_worker_calls: int = setting(
        1024, "Calls open at a worker; its engines refuse earlier.", ge=1
    )
    max_open_bytes: int = setting(
        256 * MEBIBYTE, "Bytes of all calls open at a gateway, or at a worker.", ge=1
    )
    contended_calls_per_worker: int = setting(
        2,
        "Most calls per worker that tenants with waiting calls may have together, while another "
        "active tenant has none waiting. Lower: that tenant waits less. Higher: the busy ones get "
        "more throughput.",
        option="--contended-calls",
        ge=1,
    )
    worker_wait: float = setting(10.0, "Time that a call waits for a worker.", **_SECONDS)
    worker_keepalive_timeout: float = setting(
        4.0, "Time for a worker to answer a ping; then it is lost.", **_SECONDS
    )
    client_keepalive_timeout: float = setting(
        20.0, "Time for a client to answer a ping; then its calls end.", **_SECONDS
    )


@dataclass(frozen=True)
class Engine(EngineConfig):
    """Workers, and the engines in each."""

    max_num_seqs: int = setting(
        0,
        "Sequences that a worker decodes at once, per model; 0: 32, or on a GPU as many as were "
        "verified.",
        option="--max-num-seqs",
        ge=0,
    )
    min_replicas: int = setting(
        1, "Least workers; the load decides.", option="--min-replicas", **_REPLICAS
    )
    max_replicas: int = setting(
        1, "Most workers; the load decides.", option="--max-replicas", **_REPLICAS
    )
    target_live_requests: float = setting(
        16.0,
        "Live requests per worker that the scaling aims at; 1e6 adds no worker.",
        option="--target-live-requests",
        gt=0,
        **FINITE,
    )
    downscale_delay: float = setting(
        30.0, "Time of low load before a worker is stopped.", **_SECONDS_OR_NONE
    )
    num_gpus_per_replica: float | None = setting(
        None,
        "GPUs of a worker; with 0.5 two share one.",
        option="--num-gpus-per-replica",
        unset="1 if a model runs on one",
        **{"metavar": "SHARE", "ge": 0, "le": 1},
    )
    health_period: float = setting(
        0.5, "Time between two checks of the engines' health.", **_SECONDS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"engine.max_replicas ({self.max_replicas}) must be at least "
                f"engine.min_replicas ({self.min_replicas})"
            )


@dataclass(frozen=True)
class Packages:
    """The packages that are served."""

    models: Mapping[str, str | Path] = setting(
        dict, "Packages by the name of the model: directories, or URLs that every node fetches."
    )
    cache: Path | None = setting(
        None,
        "Where each node keeps downloaded packages.",
        option="--package-cache",
        metavar="DIRECTORY",
        unset="packages in TOKENWEIR_CACHE or ~/.cache/tokenweir",
    )
    weights: Literal["int8", "int8-blocks", "int4"] | None = setting(
        None,
        "Number format of the weights of packages that are built at the start.",
        option="--weights",
        unset="that of the model",
    )
    require_signature: Path | None = setting(
        None,
        "Serve packages only that this public key has signed; see `tokenweir sign`.",
        option="--require-signature",
        metavar="PEM",
    )


@dataclass(frozen=True)
class Log:
    """Log lines of all processes of a server, on the standard error of the command."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Minimum log level; at info every request is logged.", option="--log-level"
    )
    format: Literal["text", "json"] = setting(
        "text", "Lines for people, or a JSON object a line.", option="--log-format"
    )
    requests: bool = setting(True, "Log a line for every request.")


@dataclass(frozen=True)
class Metrics:
    """Metrics for Prometheus."""

    port: int | None = setting(
        None,
        "Answer Prometheus at HOST:PORT/metrics; 0: any free port.",
        option="--metrics-port",
        unset="none",
        **_PORT,
    )
    host: str = setting(
        "127.0.0.1",
        "Interface of that port; any but loopback needs --tls-cert and --admin-tokens.",
        option="--metrics-host",
    )


@dataclass(frozen=True)
class Tracing:
    """Spans of calls for OpenTelemetry; credentials are in OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str | None = setting(
        None,
        "Collector that gets spans of calls by OTLP over HTTP, as http://127.0.0.1:4318.",
        option="--otlp-endpoint",
        metavar="URL",
    )
    sample_ratio: float = setting(
        1.0, "Share of calls that are sampled, where the client does not decide it.", ge=0, le=1
    )

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"tracing.endpoint ({self.endpoint}) must be a URL, such as http://127.0.0.1:4318"
            )


@dataclass(frozen=True)
class Settings:
    """The settings of `tokenweir serve`; other commands take those sections that are theirs."""

    listen: Listen = field(default_factory=Listen)
    tls: Tls = field(default_factory=Tls)
    auth: Auth = field(default_factory=Auth)
    admin: Admin = field(default_factory=Admin)
    http: Http = field(default_factory=Http)
    kserve: Kserve = field(default_factory=Kserve)
    limits: Limits = field(default_factory=Limits)
    engine: Engine = field(default_factory=Engine)
    packages: Packages = field(default_factory=Packages)
    log: Log = field(default_factory=Log)
    metrics: Metrics = field(default_factory=Metrics)
    tracing: Tracing = field(default_factory=Tracing)

    def check_ports(self) -> None:
        """Raise ConfigError for two services on one port, or one that has no gateway to call."""
        if self.http.port is not None and not self.listen.gateway:
            raise ConfigError(
                f"http.port ({self.http.port}) needs the gateway; leave it out, and run "
                "`tokenweir http` beside a gateway"
            )
        is_shared = self.metrics.host == self.listen.host
        is_shared |= bool(_ALL & {self.metrics.host, self.listen.host})
        ports = {
            "listen.port": self.listen.port,
            "http.port": self.http.port,
            "admin.port": self.admin.port,
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

    def check_reach(self) -> None:
        """Raise ConfigError if strangers on other machines could call, read or operate a server."""
        if self.auth.insecure:
            return
        certificate = {"a certificate (--tls-cert, --tls-key)": self.tls.cert}
        if not is_loopback(self.listen.host):
            needed = {
                **certificate,
                "authentication of clients (--tokens or --tls-client-ca)": self.auth.tokens
                or self.tls.client_ca,
            }
            if self.admin.port is not None:
                needed["authentication of operators (--admin-tokens)"] = self.admin.tokens
            where = (
                f"listen.host ({self.listen.host}) is reached from other machines, so the server"
            )
            _check_given(f"{where} needs", needed, "listen on 127.0.0.1")
        if self.metrics.port is not None and not is_loopback(self.metrics.host):
            needed = {
                **certificate,
                "authentication of readers (--admin-tokens, with --admin-port)": self.admin.tokens,
            }
            where = f"metrics.host ({self.metrics.host}) is reached from other machines, so the"
            _check_given(f"{where} metrics need", needed, "leave out --metrics-host")

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of each engine of a worker."""
        return replace(_plain(EngineConfig, self.engine), limits=_plain(RequestLimits, self.limits))

    @property
    def replicas_per_gpu(self) -> int:
        """How many replicas share a GPU."""
        gpus = self.engine.num_gpus_per_replica or 1.0
        return int(1 / gpus + 1e-6)  # a third of one, as a person writes it, is less

    def for_targets(self, targets: Iterable[Device]) -> Settings:
        """Return the settings with what follows from the targets of the packages, one each.

        The engines' part of a GPU is divided among those that share it. Raises ConfigError if
        a package cannot run on the device that was asked for.
        """
        on_gpu = [self.engine.device_for(target) for target in targets].count("cuda")
        gpus = self.engine.num_gpus_per_replica
        if not on_gpu:
            return self.with_engine(
                max_num_seqs=self.engine.max_num_seqs or DEFAULT_NUM_SEQS,
                num_gpus_per_replica=gpus or 0,
            )
        if gpus == 0:
            raise ConfigError(
                "engine.num_gpus_per_replica (0) leaves the workers without the GPU that they run "
                "on; leave it out, or set engine.device to cpu"
            )
        share = self.engine.gpu_memory_utilization / (self.replicas_per_gpu * on_gpu)
        return self.with_engine(gpu_memory_utilization=share, num_gpus_per_replica=gpus or 1)

    def with_engine(self, **changes: Any) -> Settings:
        """Return the settings with other ones of the engines."""
        return replace(self, engine=replace(self.engine, **changes))

    def with_room_for_images(self) -> Settings:
        """Return the settings with requests that have room for the largest image.

        Raises ConfigError for limits by which such an image never gets to its model.
        """
        largest, most = self.limits.max_image_bytes, self.limits.max_request_bytes
        needed = largest + _BESIDE_AN_IMAGE
        if most == Limits.max_request_bytes and needed <= MOST_REQUEST_BYTES:
            room = max(most, needed)
            return replace(self, limits=replace(self.limits, max_request_bytes=room))
        if needed > most:
            raise ConfigError(
                f"limits.max_image_bytes ({largest}) can never be reached, for "
                f"limits.max_request_bytes is {most} (at most {MOST_REQUEST_BYTES}); lower the "
                f"one, or raise the other to at least {needed}"
            )
        return self


def _plain(owner: type[T], section: T) -> T:
    """Return what a section has of the dataclass that it extends."""
    return owner(**{one.name: getattr(section, one.name) for one in fields(owner)})


def _check_given(what: str, needed: Mapping[str, Path | None], way_out: str) -> None:
    missing = [name for name, given in needed.items() if given is None]
    if missing:
        raise ConfigError(
            f"{what} {' and '.join(missing)}; give that, {way_out}, or type --insecure to take "
            "calls from everywhere"
        )
