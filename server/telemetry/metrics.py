"""The metrics of a server: what each is called and means.

Gateway and workers count in plain numbers; a snapshot of them is a list of samples. Workers tell
theirs on the wire, and the gateway's page shows all together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engine.histogram import LATENCY_BOUNDS, SIZE_BOUNDS, STEP_BOUNDS, Histogram

PREFIX = "tokenweir_"
Kind = Literal["counter", "gauge", "histogram"]
# A number, or of a histogram the count of each bucket and last the sum.
Value = float | list[float]
Sample = tuple[str, tuple[str, ...], Value]  # name without prefix, values of its labels
Snapshot = list[Sample]


@dataclass(frozen=True)
class Metric:
    """A metric; the name has no prefix, and a counter's no `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()  # a histogram's buckets

    @property
    def exported(self) -> str:
        """Its name on the page."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


_MODEL = ("model_name",)


def _latency(name: str, help: str) -> Metric:
    return Metric(name, "histogram", _MODEL, help, LATENCY_BOUNDS)


def _gauge(name: str, help: str) -> Metric:
    return Metric(name, "gauge", _MODEL, help)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", (*_MODEL, *labels), help)


# The page adds the label `worker`.
WORKER_METRICS = (
    _gauge("num_sequences_running", "Sequences in the batch now."),
    _gauge("num_requests_waiting", "Requests in the queue of the engine."),
    _gauge("num_tokens_waiting", "Most tokens that the requests in that queue may take."),
    _gauge("kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1."),
    _latency("time_to_first_token_seconds", "From arrival at the worker to the first token."),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        _MODEL,
        "Time between two tokens of a sequence.",
        STEP_BOUNDS,
    ),
    _latency("request_time_per_output_token_seconds", "Mean time between two tokens of a request."),
    _latency("e2e_request_latency_seconds", "From arrival at the worker to the end of the answer."),
    _latency("request_queue_time_seconds", "Time in the queue of the engine."),
    _latency("request_prefill_time_seconds", "From admission to a batch to the first token."),
    _latency("request_decode_time_seconds", "From the first token to the last."),
    Metric("step_seconds", "histogram", _MODEL, "Time of a step of the engine.", STEP_BOUNDS),
    Metric("step_batch_size", "histogram", _MODEL, "Sequences or items in a step.", SIZE_BOUNDS),
    _counter("prompt_tokens", "Input tokens of answered requests."),
    _counter("generation_tokens", "Output tokens of answered requests."),
    _counter("prefix_cache_queries", "Input tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Input tokens found in the prefix cache."),
    _counter(
        "request_success", "Finished sequences, by the reason of their end.", "finished_reason"
    ),
    _counter(
        "request_failures", "Requests that failed at a worker or were refused there.", "reason"
    ),
    _counter(
        "wasted_tokens",
        "Tokens computed in vain: padding, cancelled, expired, failed, discarded, preempted.",
        "kind",
    ),
)
GATEWAY_METRICS = (
    Metric(
        "gateway_requests", "counter", ("method", "code"), "Calls that have ended at the gateway."
    ),
    Metric(
        "gateway_refusals",
        "counter",
        ("reason",),
        "Calls that the gateway refused or ended itself.",
    ),
    Metric("gateway_resumed_streams", "counter", (), "Streams to be resumed at another worker."),
    Metric("gateway_requests_waiting", "gauge", (), "Calls that wait for their turn."),
    Metric("gateway_requests_running", "gauge", (), "Calls that wait or are being answered."),
    Metric(
        "gateway_queue_seconds",
        "histogram",
        (),
        "Time that a call waits for its turn.",
        LATENCY_BOUNDS,
    ),
    Metric(
        "gateway_request_seconds",
        "histogram",
        ("method",),
        "From the request of a call to its end.",
        LATENCY_BOUNDS,
    ),
    Metric("workers_serving", "gauge", (), "Workers that take calls."),
    Metric(
        "worker_restarts", "counter", (), "Workers that took the place of one that died or hung."
    ),
)
METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metric in (*WORKER_METRICS, *GATEWAY_METRICS)}
)


class Counts:
    """Counters and histograms by the values of their labels; any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Count something."""
        key = name, labels
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + by

    def observe(self, name: str, values: Iterable[float], *labels: str) -> None:
        """Count values by their size."""
        key = name, labels
        with self._lock:
            if (histogram := self._histograms.get(key)) is None:
                histogram = self._histograms[key] = Histogram(METRICS[name].bounds)
            for value in values:
                histogram.add(value)

    def snapshot(self) -> Snapshot:
        """Return what was counted so far."""
        with self._lock:
            return [
                *((name, labels, value) for (name, labels), value in self._counters.items()),
                *((name, labels, h.counts()) for (name, labels), h in self._histograms.items()),
            ]


def known_samples(told: Iterable[Sample]) -> Snapshot:
    """Return the samples of metrics that are known here; others may be of another release."""
    return [sample for sample in told if _is_known(*sample)]


def _is_known(name: str, labels: Sequence[str], value: Value) -> bool:
    metric = METRICS.get(name)
    if metric is None or len(labels) != len(metric.labels):
        return False
    if metric.kind == "histogram":
        return isinstance(value, list) and len(value) == len(metric.bounds) + 2
    return not isinstance(value, list)
