"""The spans of a call at its worker: queue, prefill and decode within one."""

from __future__ import annotations

from server.telemetry.tracing import Tracing, end_span, set_status
from server.worker.call_record import CallRecord


class CallSpans:
    """Makes them once a call has ended: while it runs, nothing is done for them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def observe(self, record: CallRecord) -> None:
        """Make the spans of a call; of several inputs the parts of the slowest."""
        span = self._tracing.span(
            f"{record.method} {record.model}".strip(),
            record.traceparent,
            record.arrived,
            {
                "gen_ai.request.model": record.model,
                "gen_ai.usage.input_tokens": record.input_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "tokenweir.request_id": record.request_id,
                "tokenweir.tenant": record.tenant,
            },
        )
        if not span.is_recording():
            return
        set_status(span, record.status)
        if record.parts:
            slowest = max(
                (part.timing for part in record.parts), key=lambda t: t.queue + t.prefill + t.decode
            )
            end = record.arrived
            for name in ("queue", "prefill", "decode"):
                start, end = end, end + getattr(slowest, name)
                self._tracing.add_part(span, name, start, end)
        end_span(span, record.arrived + record.seconds)
