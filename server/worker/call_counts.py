"""A worker's counts of its calls and engines, for the metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from server.telemetry.metrics import Counts, Snapshot
from server.worker.call_record import OK, CallRecord, Part
from server.worker.engines import Engine


class CallCounts:
    """Takes in calls that have ended; tells of them and of the engines."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        """`engines` are those of the worker, by the name of their model."""
        self._engines = engines
        self._counts = Counts()

    def observe(self, record: CallRecord) -> None:
        """Count a call that has ended."""
        counts, model = self._counts, record.model
        if record.status != OK:
            counts.count("request_failures", model, record.reason or record.status)
            return
        counts.observe("e2e_request_latency_seconds", record.seconds, model)
        for reason in record.finish_reasons:
            counts.count("request_success", model, reason)
        for part in record.parts:
            self._observe_part(part, model)

    def snapshot(self) -> Snapshot:
        """Return all samples of this worker."""
        samples = self._counts.snapshot()
        for model, engine in self._engines.items():
            samples += _engine_samples(model, engine)
        return samples

    def _observe_part(self, part: Part, model: str) -> None:
        counts, usage, timing = self._counts, part.usage, part.timing
        counts.count("prompt_tokens", model, by=usage.input_tokens)
        counts.count("prefix_cache_queries", model, by=usage.input_tokens)
        counts.count("prefix_cache_hits", model, by=usage.cached_input_tokens)
        counts.observe("request_queue_time_seconds", timing.queue, model)
        counts.observe("request_prefill_time_seconds", timing.prefill, model)
        if usage.output_tokens:
            counts.count("generation_tokens", model, by=usage.output_tokens)
            counts.observe("time_to_first_token_seconds", timing.time_to_first_token, model)
            counts.observe("request_decode_time_seconds", timing.decode, model)
        if (pace := part.seconds_per_token) is not None:
            counts.observe("request_time_per_output_token_seconds", pace, model)


def _engine_samples(model: str, engine: Engine) -> Snapshot:
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
