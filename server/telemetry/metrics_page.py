"""The page that Prometheus reads: what gateway and workers have counted, in one answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from engine.errors import ConfigError, Unauthenticated
from server.auth.tls import server_context
from server.auth.tokens import TokenFile
from server.hosts import is_loopback
from server.settings import Settings
from server.telemetry.metrics import (
    GATEWAY_METRICS,
    METRICS,
    PREFIX,
    WORKER_METRICS,
    Metric,
    Snapshot,
)
from server.telemetry.metrics_server import MetricsServer

logger = logging.getLogger(__name__)

_MAX_ECHO = 64  # characters of a request that an answer repeats

App = Callable[[Any, Any, Any], Awaitable[None]]  # ASGI
Source = Callable[[], Snapshot]
Sources = Callable[[], Iterable[tuple[str, Snapshot]]]  # workers by name


class MetricsPage:
    """Answers on a port of its own, in a thread of its own."""

    def __init__(self, config: Settings, here: Sequence[Source], workers: Sources = list) -> None:
        """Listen; ask `here` and `workers` in another thread, whenever somebody reads.

        Readers show an operator's token if operators have such; pages that other machines can read
        are encrypted if there is a certificate. Raises ConfigError for files that cannot be used,
        and if nobody can listen there.
        """
        host, port = config.metrics.host, config.metrics.port or 0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(here, workers))
        ProcessCollector(registry=registry)
        tokens = config.admin.tokens
        app = _guarded(make_asgi_app(registry), None if tokens is None else TokenFile(tokens))
        is_encrypted = config.tls.cert is not None and not is_loopback(host)
        tls = server_context(config.tls) if is_encrypted else None
        try:
            self._server = MetricsServer(host, port, app, tls)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be had on {host}:{port}: {error.strerror or error}; stop what "
                "uses the port, or choose another with --metrics-port (0: any that is free)"
            ) from error
        self.port: int = self._server.port
        scheme, place = "https" if is_encrypted else "http", f"[{host}]" if ":" in host else host
        logger.info("metrics on %s://%s:%d/metrics", scheme, place, self.port)

    def close(self) -> None:
        """Listen no more."""
        self._server.end()


def _guarded(app: App, operators: TokenFile | None) -> App:
    """Return an application that answers GET and HEAD of the page, to operators if there are such.

    prometheus_client's own answers every method and path.
    """

    async def guarded(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def refuse(status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
            told = [*headers, (b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": status, "headers": told})
            await send({"type": "http.response.body", "body": f"{text}\n".encode()})

        method, path = scope["method"], scope["path"]
        shown = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            if operators is not None:
                operators.identity(shown)
        except Unauthenticated as error:
            await refuse(401, str(error), (b"www-authenticate", b"Bearer"))
        else:
            if path not in ("/", "/metrics"):
                await refuse(404, f"there is no {path[:_MAX_ECHO]!a} here; metrics are at /metrics")
            elif method not in ("GET", "HEAD"):
                what = f"{method[:_MAX_ECHO]} is not allowed; read metrics by GET"
                await refuse(405, what, (b"allow", b"GET, HEAD"))
            else:
                await app(scope, receive, send)

    return guarded


class _Page(Collector):
    """Makes Prometheus' families of samples."""

    def __init__(self, here: Sequence[Source], workers: Sources) -> None:
        self._here, self._workers = here, workers

    def collect(self) -> Iterator[Family]:
        families = {metric.name: _family(metric, ()) for metric in GATEWAY_METRICS}
        for snapshot in self._here:
            _add(families, snapshot(), ())
        families |= {metric.name: _family(metric, ("worker",)) for metric in WORKER_METRICS}
        for worker, samples in self._workers():
            _add(families, samples, (worker,))
        yield from families.values()


def _family(metric: Metric, more_labels: tuple[str, ...]) -> Family:
    name, labels = PREFIX + metric.name, (*metric.labels, *more_labels)
    match metric.kind:
        case "counter":
            return CounterMetricFamily(name, metric.help, labels=labels)
        case "gauge":
            return GaugeMetricFamily(name, metric.help, labels=labels)
        case "histogram":
            return HistogramMetricFamily(name, metric.help, labels=labels)


def _add(families: dict[str, Family], samples: Snapshot, more_labels: tuple[str, ...]) -> None:
    for name, labels, value in samples:
        family, all_labels = families[name], (*labels, *more_labels)
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, list), f"{name} is a histogram"
            *counts, total = value
            bounds = [*(f"{bound:g}" for bound in METRICS[name].bounds), "+Inf"]
            below = itertools.accumulate(counts)  # all that is below a bound, as the page has it
            family.add_metric(all_labels, list(zip(bounds, below, strict=True)), total)
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            assert not isinstance(value, list), f"{name} is a number"
            family.add_metric(all_labels, value)
