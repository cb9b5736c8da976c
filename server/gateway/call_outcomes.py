"""Outcomes of calls at the gateway: counted, and logged if no worker has a line of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import grpc

from engine.errors import ReplicaLost, ReplicasLost, Starting
from server.api import METHODS
from server.calls.call_server import ServerCall
from server.calls.status import CallStatus
from server.gateway.request_head import RequestHead
from server.telemetry.logs import REQUESTS, LogBudget, with_fields
from server.telemetry.metrics import Counts
from server.telemetry.tracing import Tracing, set_status, trace_id_in, traceparent_in

_OF_NO_WORKER = frozenset({ReplicaLost.reason, ReplicasLost.reason, Starting.reason})
_CANCELLED = grpc.StatusCode.CANCELLED.name
_MAX_CHARS = 200
_NAMES = {method: method.rpartition("/")[2] for method in METHODS}  # others may be anything
logger = logging.getLogger(REQUESTS)


class CallOutcomes:
    """Takes them in, from any thread; of what failed here so many lines a second at most."""

    def __init__(
        self, tracing: Tracing | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = Counts()
        self._tracing = tracing
        self._lock = threading.Lock()
        self._budget = LogBudget(clock)

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
        """Note a call that failed at a worker, or for want of one; a worker logs its own."""
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
        with self._lock:
            left_out, is_taken = self._budget.left_out, self._budget.take()
        if not is_taken:
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
