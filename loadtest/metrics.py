"""The measurements of each request, and the statistics of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtest.target.target import Told

MAX_SHARE, MAX_DELAY = 0.8, 0.025  # share of a core; p99 seconds: above, the load test is the limit


@dataclass(frozen=True)
class RequestRecord(Told):
    """One request; times are in seconds from the start of the test."""

    index: int
    prompt: int  # index among the different requests of the work
    scheduled: float  # when it was due; latencies count from here
    sent: float  # when it was sent
    finished: float  # the end of its call, good or bad
    status: str  # "OK", or the name of the gRPC status
    reason: str = ""  # the error's
    message: str = ""  # the error's
    token_times: tuple[float, ...] = ()  # messages that brought tokens
    kind: str = ""  # in a mix
    turn: int = 0  # in its session
    check: Literal["", "right", "wrong"] = ""  # against the answer that was expected

    @property
    def ok(self) -> bool:
        return self.status == "OK"

    @property
    def error(self) -> str:
        """The error in short, as "RESOURCE_EXHAUSTED QUEUE_FULL"."""
        return f"{self.status} {self.reason}".strip()

    @property
    def end_to_end(self) -> float:
        return self.finished - self.scheduled

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.scheduled if self.token_times else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time of a token after those of the first message; None if there are none."""
        later_tokens = self.output_tokens - self.first_tokens
        if not self.token_times or later_tokens < 1:
            return None
        return (self.finished - self.token_times[0]) / later_tokens

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """Gaps between consecutive messages that brought tokens."""
        return tuple(np.diff(self.token_times).tolist())


@dataclass(frozen=True)
class Distribution:
    """A latency in seconds, over all that was measured of it."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Window:
    """The seconds of a test whose requests count: from `start` on, and before `end`."""

    start: float
    end: float

    @property
    def duration(self) -> float:
        return max(0.0, self.end - self.start)

    def has(self, time: float) -> bool:
        """Return whether a time is within."""
        return self.start <= time < self.end


@dataclass(frozen=True)
class LoadSummary:
    """The statistics of a window of a load test.

    Latencies are those of requests that were due in it and succeeded, throughput is of what
    ended in it.
    """

    duration: float  # seconds of the window
    num_ok: int
    errors: Mapping[str, int]  # by status and reason
    requests_per_second: float  # successful ones
    output_tokens_per_second: float
    input_tokens: int
    output_tokens: int
    max_in_flight: int  # requests sent and not finished, at most
    time_to_first_token: Distribution | None
    inter_token_latency: Distribution | None
    time_per_output_token: Distribution | None
    end_to_end: Distribution | None
    send_delay: Distribution | None  # scheduled to sent, of all: what the client itself adds
    server_queue: Distribution | None
    server_first_token: Distribution | None
    mean_batch_size: float | None
    cached_input_tokens: int | None = None  # None: the server does not tell
    num_due: int = 0


@dataclass(frozen=True)
class OwnLoad:
    """How busy the load test itself was: what it cannot send or read in time looks like latency."""

    processor_share: float  # one core's, by the busiest event loop; it has no more than one
    loop_delay: Distribution | None  # the wait of all that needs the event loop
    num_processes: int = 1

    def __str__(self) -> str:
        delay = self.loop_delay
        late = f", {delay.p99 * 1000:.1f} ms late (p99)" if delay else ""
        return f"{self.processor_share:.0%} of a core{late}"

    @property
    def is_busy(self) -> bool:
        """Return whether it has had hardly any time left."""
        return self.processor_share > MAX_SHARE

    @property
    def is_limit(self) -> bool:
        """Return whether the server may be faster than what was measured."""
        delay = self.loop_delay.p99 if self.loop_delay else 0.0
        return self.is_busy or delay > MAX_DELAY


def window_of(
    records: Sequence[RequestRecord], warmup: float = 0.0, end: float | None = None
) -> Window:
    """Return the window from the warm-up to `end`, or until the last request has ended."""
    if end is None:
        last = max((record.finished for record in records), default=0.0)
        end = math.nextafter(last, math.inf)  # so that it is within
    return Window(warmup, end)


def due_in(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """Return the requests that were due in the window."""
    return [record for record in records if window.has(record.scheduled)]


def summarize(records: Sequence[RequestRecord], window: Window | None = None) -> LoadSummary:
    """Return the statistics of a window, of all of the test if none is given."""
    window = window or window_of(records)
    due = due_in(records, window)
    good = [record for record in due if record.ok]
    ended = [record for record in records if record.ok and window.has(record.finished)]
    batch_sizes = [r.server_batch_size for r in good if r.server_batch_size is not None]
    return LoadSummary(
        duration=window.duration,
        num_due=len(due),
        num_ok=len(good),
        errors=dict(Counter(record.error for record in due if not record.ok).most_common()),
        requests_per_second=_rate(len(ended), window),
        output_tokens_per_second=_rate(sum(record.output_tokens for record in ended), window),
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        max_in_flight=_max_in_flight(records),
        time_to_first_token=distribution(r.time_to_first_token for r in good),
        inter_token_latency=distribution(gap for r in good for gap in r.inter_token_latencies),
        time_per_output_token=distribution(r.time_per_output_token for r in good),
        end_to_end=distribution(r.end_to_end for r in good),
        send_delay=distribution(r.sent - r.scheduled for r in due),
        server_queue=distribution(r.server_queue for r in good),
        server_first_token=distribution(r.server_first_token for r in good),
        mean_batch_size=float(np.mean(batch_sizes)) if batch_sizes else None,
        cached_input_tokens=_sum(record.cached_input_tokens for record in good),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rate(number: int, window: Window) -> float:
    return number / window.duration if window.duration else 0.0


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return the statistics of the values that are there; None if there are none."""
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    p50, p90, p95, p99 = np.percentile(known, [50, 90, 95, 99]).tolist()
    return Distribution(
        count=known.size,
        mean=float(known.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(known.max()),
    )


def _max_in_flight(records: Sequence[RequestRecord]) -> int:
    times = np.array([r.sent for r in records] + [r.finished for r in records])
    change = np.repeat([1, -1], len(records))
    # At equal times ends come first: a closed loop sends when an answer is there.
    return int(np.cumsum(change[np.lexsort((change, times))]).max(initial=0))
