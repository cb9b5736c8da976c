"""A worker's measures of its engines, for the metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from server.telemetry.metrics import Snapshot
from server.wire.work_pb2 import Sample
from server.worker.engines import Engine


def engine_samples(engines: Mapping[str, Engine]) -> list[Sample]:
    """Return the samples of engines, by the name of their model, for the wire."""
    return [
        Sample(name=name, labels=labels, values=value if isinstance(value, list) else [value])
        for model, engine in engines.items()
        for name, labels, value in _samples(model, engine)
    ]


def _samples(model: str, engine: Engine) -> Snapshot:
    load, measures, labels = engine.load(), engine.measures, (model,)
    return [
        ("num_sequences_running", labels, load.running),
        ("num_requests_waiting", labels, load.waiting),
        ("num_tokens_waiting", labels, load.waiting_tokens),
        ("kv_cache_usage_perc", labels, load.cache_used),
        ("inter_token_latency_seconds", labels, measures.inter_token.counts()),
        ("step_seconds", labels, measures.seconds.counts()),
        ("step_batch_size", labels, measures.batch_size.counts()),
        *(
            ("wasted_tokens", (model, kind.removesuffix("_tokens")), count)
            for kind, count in asdict(load.wasted).items()
        ),
    ]
