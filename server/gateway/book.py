"""The book of calls: a line of the log, counts and spans of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from engine.errors import ReplicaLost, ReplicasLost, Starting
from server.api import METHODS
from server.calls.call_server import ServerCall
from server.calls.status import CallStatus
from server.gateway.request_head import RequestHead
from server.telemetry.logs import REQUESTS, Fields, LogBudget, with_fields
from server.telemetry.metrics import Counts, Snapshot
from server.telemetry.tracing import Tracing, end_span, set_status, trace_id_in, traceparent_in
from server.wire.work_pb2 import Part, Record

_OK, _CANCELLED = "OK", "CANCELLED"
_GATHERING = 0.1  # seconds in which calls that end are entered together, when clients have answers
_MAX_CHARS = 200  # a client's names and an error's text are cut here
_NAMES = {method: method.rpartition("/")[2] for method in METHODS}  # others may be anything
_OF_NO_WORKER = frozenset({ReplicaLost.reason, ReplicasLost.reason, Starting.reason})
logger = logging.getLogger(REQUESTS)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call that a worker has answered, or that was cancelled there."""

    method: str
    worker: str  # its address
    tenant: str
    waited: float  # seconds at the gateway before the worker had it
    ended: float  # seconds since 1970
    status: str  # the name of a grpc.StatusCode
    told: Record  # by the worker
    traceparent: str = ""

    @property
    def name(self) -> str:
        """The method without its service."""
        return self.method.rpartition("/")[2]

    def fields(self) -> Fields:
        """Return what the line says; times are in seconds, of several inputs the longest.

        They count from the arrival at the worker, but for `gateway_queue`, the time before that.
        """
        told = self.told
        fields: dict[str, str | int | float] = {
            "request_id": told.request_id,
            "method": self.name,
            "model": told.model[:_MAX_CHARS],
            "tenant": self.tenant[:_MAX_CHARS],
            "input_tokens": sum(part.input_tokens for part in told.parts),
            "output_tokens": sum(part.output_tokens for part in told.parts),
            "gateway_queue": round(self.waited, 6),
            "seconds": round(told.seconds, 6),
        }
        if told.parts:
            fields["queue"] = round(max(part.queue for part in told.parts), 6)
            fields["ttft"] = round(max(part.time_to_first_token for part in told.parts), 6)
        if paces := [pace for part in told.parts if (pace := _seconds_per_token(part)) is not None]:
            fields["tpot"] = round(max(paces), 6)
        if told.finish_reasons:
            fields["finish"] = ",".join(dict.fromkeys(told.finish_reasons))
        fields["status"] = self.status
        if self.status != _OK:
            fields |= {"reason": told.reason, "error": told.error[:_MAX_CHARS]}
        if trace_id := trace_id_in(self.traceparent):
            fields["trace_id"] = trace_id
        return {**fields, "worker": self.worker}


class Book:
    """Calls that a worker has had, and those that have ended at the gateway.

    The first are taken in on the event loop, and entered soon after. The others may come from any
    thread, by the thousand, so that only some have a line.
    """

    def __init__(
        self,
        workers: Callable[[], Collection[str]],
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers` are those that are known now, by address: others have no counts any more."""
        self.counts = Counts()  # the gateway's
        self._workers = workers
        self._tracing = tracing
        self._budget = LogBudget(clock)
        self._records: list[CallRecord] = []
        self._counts: dict[str, Counts] = {}  # by worker

    @contextmanager
    def answering(self, call: ServerCall) -> Iterator[None]:
        """Count a call that is answered in the block, with the code that it ends with."""
        started = time.monotonic()
        tracing = None if self._tracing is None else self._tracing.relaying(call, time.time())
        with tracing or nullcontext() as span:
            try:
                yield
            finally:
                code = _CANCELLED if call.code is None else call.code.name
                if span is not None:
                    set_status(span, code)
                name = _NAMES.get(call.method, "unknown")
                self.counts.observe("gateway_request_seconds", (time.monotonic() - started,), name)
                self.counts.count("gateway_requests", name, code)

    def had_its_turn(self, seconds: float) -> None:
        """Count how long a call has waited for its turn."""
        self.counts.observe("gateway_queue_seconds", (seconds,))

    def failed(
        self, call: ServerCall, request_id: str, head: RequestHead, status: CallStatus
    ) -> None:
        """Note a call that failed at a worker, which has entered it, or for want of one."""
        if (reason := status.reason) in _OF_NO_WORKER:
            self.refused(call, request_id, head, status, reason)

    def refused(
        self, call: ServerCall, request_id: str, head: RequestHead, status: CallStatus, reason: str
    ) -> None:
        """Note a call that the gateway has ended itself; there may be thousands a second."""
        self.counts.count("gateway_refusals", reason)
        failure = {"reason": reason, "error": status.message[:_MAX_CHARS]}
        self._log(call, request_id, head, status=status.code.name, **failure)

    def given_up(self, call: ServerCall, request_id: str, head: RequestHead) -> None:
        """Note a call whose client has gone before any worker had it."""
        self._log(call, request_id, head, status=_CANCELLED)

    def _log(self, call: ServerCall, request_id: str, head: RequestHead, **end: str) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        left_out = self._budget.left_out  # about, where two threads come at once
        if not self._budget.take():
            return
        if left_out:
            logger.info("(%s lines like the next are left out)", f"{left_out:,}")
        if trace_id := trace_id_in(traceparent_in(call.invocation_metadata())):
            end["trace_id"] = trace_id
        fields = with_fields(
            request_id=request_id,
            method=call.method.rpartition("/")[2][:_MAX_CHARS],
            model=head.model[:_MAX_CHARS],
            tenant=head.tenant[:_MAX_CHARS],
            **end,
        )
        logger.info("request", extra=fields)

    def enter(self, record: CallRecord) -> None:
        """Take in a call that has just ended; nothing for a method that no worker has."""
        if record.method not in METHODS:
            return
        if not self._records:
            asyncio.get_running_loop().call_later(_GATHERING, self.flush)
        self._records.append(record)

    def flush(self) -> None:
        """Enter all that was taken in."""
        records, self._records = self._records, []
        known = self._workers()
        for worker in self._counts.keys() - known:
            del self._counts[worker]
        answered: dict[tuple[str, str], list[Record]] = {}  # by worker and model
        for record in records:
            if logger.isEnabledFor(logging.INFO):
                line = logger.makeRecord(
                    *(REQUESTS, logging.INFO, "", 0, "request", (), None),
                    extra=with_fields(**record.fields()),
                )
                line.created = record.ended
                logger.handle(line)
            if record.worker in known:
                if record.status == _OK:
                    answered.setdefault((record.worker, record.told.model), []).append(record.told)
                else:
                    reason = record.told.reason or record.status
                    counts = self._counts_of(record.worker)
                    counts.count("request_failures", record.told.model, reason)
            if self._tracing is not None:
                add_spans(self._tracing, record)
        for (worker, model), told in answered.items():
            _count(self._counts_of(worker), told, model)

    def snapshots(self) -> list[tuple[str, Snapshot]]:
        """Return what was counted, by worker; any thread may ask."""
        return [(worker, counts.snapshot()) for worker, counts in tuple(self._counts.items())]

    def _counts_of(self, worker: str) -> Counts:
        return self._counts.setdefault(worker, Counts())


def add_spans(tracing: Tracing, record: CallRecord) -> None:
    """Make the spans of a call that has ended; of several inputs the parts of the slowest."""
    told = record.told
    arrived = record.ended - told.seconds
    span = tracing.span(
        f"{record.name} {told.model}".strip(),
        record.traceparent,
        arrived,
        {
            "gen_ai.request.model": told.model,
            "gen_ai.usage.input_tokens": sum(part.input_tokens for part in told.parts),
            "gen_ai.usage.output_tokens": sum(part.output_tokens for part in told.parts),
            "tokenweir.request_id": told.request_id,
            "tokenweir.tenant": record.tenant,
            "tokenweir.worker": record.worker,
        },
    )
    if not span.is_recording():
        return
    set_status(span, record.status)
    if told.parts:
        slowest = max(told.parts, key=lambda part: part.queue + part.prefill + part.decode)
        end = arrived
        for name in ("queue", "prefill", "decode"):
            start, end = end, end + getattr(slowest, name)
            tracing.add_part(span, name, start, end)
    end_span(span, record.ended)


def _count(counts: Counts, told: Sequence[Record], model: str) -> None:
    """Count calls of a model that were answered: many at once cost little more than one."""
    counts.observe("e2e_request_latency_seconds", [one.seconds for one in told], model)
    for reason, number in Counter(reason for one in told for reason in one.finish_reasons).items():
        counts.count("request_success", model, reason, by=number)
    if parts := [part for one in told for part in one.parts]:
        _count_parts(counts, parts, model)


def _count_parts(counts: Counts, parts: Sequence[Part], model: str) -> None:
    num_input_tokens = sum([part.input_tokens for part in parts])
    num_cached = sum([part.cached_input_tokens for part in parts])
    counts.count("prompt_tokens", model, by=num_input_tokens)
    counts.count("prefix_cache_queries", model, by=num_input_tokens)
    counts.count("prefix_cache_hits", model, by=num_cached)
    counts.observe("request_queue_time_seconds", [part.queue for part in parts], model)
    counts.observe("request_prefill_time_seconds", [part.prefill for part in parts], model)
    if generated := [part for part in parts if part.output_tokens]:
        first = [part.time_to_first_token for part in generated]
        num_output_tokens = sum([part.output_tokens for part in generated])
        counts.count("generation_tokens", model, by=num_output_tokens)
        counts.observe("time_to_first_token_seconds", first, model)
        counts.observe("request_decode_time_seconds", [part.decode for part in generated], model)
    if paces := [pace for part in parts if (pace := _seconds_per_token(part)) is not None]:
        counts.observe("request_time_per_output_token_seconds", paces, model)


def _seconds_per_token(part: Part) -> float | None:
    """Return the mean time between two tokens of a sequence; None without a second one."""
    num_gaps = part.output_tokens / max(1, part.num_sequences) - 1
    return part.decode / num_gaps if num_gaps > 0 else None
