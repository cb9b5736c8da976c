"""The line of the log that every request has."""

from __future__ import annotations

from server.telemetry.logs import Fields, JsonFormatter, TextFormatter
from server.telemetry.trace_context import trace_id_in
from server.worker.call_record import OK, CallRecord

_MAX_CHARS = 200  # a client's names and an error's text are cut here


def request_fields(record: CallRecord) -> Fields:
    """Return what the line of a request says; times are in seconds, of several inputs the longest.

    They count from its arrival at the worker; `waited` is how long a gateway has had it before.
    To be asked once the request has ended.
    """
    fields: dict[str, str | int | float] = {
        "request_id": record.request_id,
        "method": record.method,
        "model": record.model[:_MAX_CHARS],
        "tenant": record.tenant[:_MAX_CHARS],
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
    }
    if record.waited is not None:
        fields["waited"] = record.waited
    fields["seconds"] = round(record.seconds, 6)
    if parts := record.parts:
        fields["queue"] = round(max([part.timing.queue for part in parts]), 6)
        fields["ttft"] = round(max([part.timing.time_to_first_token for part in parts]), 6)
    if paces := [pace for part in parts if (pace := part.seconds_per_token) is not None]:
        fields["tpot"] = round(max(paces), 6)
    if record.finish_reasons:
        fields["finish"] = ",".join(dict.fromkeys(record.finish_reasons))
    fields["status"] = record.status
    if record.status != OK:
        fields |= {"reason": record.reason, "error": record.error[:_MAX_CHARS]}
    if trace_id := trace_id_in(record.traceparent):
        fields["trace_id"] = trace_id
    return fields


def request_line(record: CallRecord, worker: str, formatter: TextFormatter | JsonFormatter) -> str:
    """Return the line of a request that has ended at this worker."""
    fields = {**request_fields(record), "worker": worker}
    return formatter.request_line(record.arrived + record.seconds, fields)
