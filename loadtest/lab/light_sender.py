"""Sends streams at little cost, so that a study of overload measures the server and not itself.

A client of asyncio takes half a millisecond for a call that is refused at once. This one stands on
gRPC's core: requests are bytes that were made before, and of a call no more is kept than its times
and how it ended. On the wire its calls are those of the Python client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from loadtest.errors import LoadTestError
from loadtest.metrics import OwnLoad, distribution
from server.calls import grpc_core as core
from server.calls.status import DETAILS_KEY, CallStatus

_PATIENCE = 10.0  # seconds behind the deadline of the last call, in which all have ended
_PAUSE = 0.001  # seconds: the thread that takes events then takes all that have come
_AT_ONCE = 0.00005  # seconds in which an event is had that is there already
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_OPTIONS = (
    ("grpc.enable_retries", 0),  # a retry hides a refusal
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_metadata_size", 64 * 2**10),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(slots=True)
class LightCall:
    """A call; times are in seconds from the start of its loop."""

    due: float  # latencies count from here
    sent: float
    finished: float = 0.0
    code: grpc.StatusCode = grpc.StatusCode.CANCELLED
    details: bytes = b""  # a google.rpc.Status

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK

    @property
    def end_to_end(self) -> float:
        return self.finished - self.due

    @property
    def error(self) -> str:
        """The error in short, as "RESOURCE_EXHAUSTED QUEUE_FULL"."""
        status = CallStatus(self.code, "", ((DETAILS_KEY, self.details),))
        return f"{self.code.name} {status.reason}".strip()


@dataclass(frozen=True)
class LightLoop:
    """All calls of a loop, in the order of their ends."""

    calls: tuple[LightCall, ...]
    own: OwnLoad  # the whole process's; the delay is that of sending

    @property
    def seconds(self) -> float:
        """From its start to the end of the last call."""
        return self.calls[-1].finished

    @property
    def answered_per_second(self) -> float:
        return sum(call.ok for call in self.calls) / self.seconds


class LightSender:
    """Sends streams of one method over one connection: a request each, read to the end.

    One thread sends, and another one takes what comes back.
    """

    def __init__(self, address: str, method: str, timeout: float) -> None:
        """Ask `method`, as "/package.Service/Method"; every call has `timeout` seconds."""
        self._method, self._timeout = method.encode(), timeout
        self._channel = core.Channel(address.encode(), _OPTIONS, None)

    def closed_loop(self, requests: Sequence[bytes], concurrency: int) -> LightLoop:
        """Send all requests, so many at once: the next one when one has ended."""
        rest = iter(requests)

        def send_next() -> None:
            if (request := next(rest, None)) is not None:
                self._send(request, self._now())

        self._begin(len(requests), send_next)
        for _ in range(concurrency):
            send_next()
        return self._end()

    def open_loop(self, requests: Sequence[bytes], times: Sequence[float]) -> LightLoop:
        """Send every request when it is due, seconds from now."""
        self._begin(len(requests), lambda: None)
        for request, due in zip(requests, times, strict=True):
            if (wait := due - self._now()) > 0:
                time.sleep(wait)
            self._send(request, due)
        return self._end()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close(core.CANCELLED, "the load test has ended")

    def _begin(self, num_calls: int, ended: Callable[[], None]) -> None:
        """Take events in a thread until all calls have ended; call `ended` behind each of them."""
        self._num_calls = num_calls
        self._ended: list[LightCall] = []
        self._start, self._processor_start = time.monotonic(), time.process_time()
        self._thread = threading.Thread(target=self._take_events, args=(ended,), daemon=True)
        self._thread.start()

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _send(self, request: bytes, due: float) -> None:
        exchange = _Exchange(LightCall(due, self._now()), self._ended, self._now)
        exchange.begin(self._channel, self._method, request, time.time() + self._timeout)

    def _end(self) -> LightLoop:
        """Wait for the end of all; LoadTestError if that does not come."""
        self._thread.join(self._timeout + _PATIENCE)
        if self._thread.is_alive():
            missing = self._num_calls - len(self._ended)
            what = f"{missing} of {self._num_calls} calls have not ended"
            raise LoadTestError(f"{what}, although their deadline is over")
        share = (time.process_time() - self._processor_start) / self._now()
        delays = distribution(call.sent - call.due for call in self._ended)
        return LightLoop(tuple(self._ended), OwnLoad(share, delays))

    def _take_events(self, ended: Callable[[], None]) -> None:
        while len(self._ended) < self._num_calls:
            before, asked = len(self._ended), time.monotonic()
            event = self._channel.next_call_event()
            was_waited_for = time.monotonic() - asked > _AT_ONCE
            event.tag(event)
            if len(self._ended) > before:
                ended()
            if was_waited_for:
                time.sleep(_PAUSE)


class _Exchange:
    """Messages of one call, sent and received."""

    def __init__(self, record: LightCall, ended: list[LightCall], now: Callable[[], float]) -> None:
        self._record, self._ended, self._now = record, ended, now
        self._num_due = 2

    def begin(self, channel: Any, method: bytes, request: bytes, deadline: float) -> None:
        sending = (
            core.send_metadata(()),
            core.send_message(request),
            core.send_close(),
            core.receive_status(),
        )
        first = (core.receive_metadata(), core.receive_message())
        batches = ((sending, self._has_ended), (first, self._has_come))
        self._call = channel.integrated_call(
            core.NO_FLAGS, method, None, deadline, (), None, batches
        )

    def _has_come(self, event: Any) -> None:
        self._num_due -= 1
        if event.batch_operations[-1].message() is not None:
            operation = (core.receive_message(),)
            self._num_due += bool(self._call.operate(operation, self._has_come))
        self._settle()

    def _has_ended(self, event: Any) -> None:
        self._num_due -= 1
        status = event.batch_operations[-1]
        self._record.code = _CODES.get(status.code(), grpc.StatusCode.UNKNOWN)
        for key, value in status.trailing_metadata() or ():
            if key == DETAILS_KEY:
                self._record.details = value
        self._settle()

    def _settle(self) -> None:
        if not self._num_due:
            self._record.finished = self._now()
            self._ended.append(self._record)
