"""The settings of a load test."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.arrival.arrival import Arrival, ClosedLoop, OpenLoop
from loadtest.errors import LoadTestError
from loadtest.goals import Slo


@dataclass(frozen=True)
class LoadConfig:
    """A load test: whom it asks, when, for how long, and what the answers have to be."""

    address: str  # "host:port", or the "http://host:port/v1" of a server of OpenAI's protocol
    model: str
    arrival: Arrival
    num_requests: int | None = None  # the test ends at the first of the two; of sessions: sessions
    duration: float | None = None  # seconds in which requests are due
    warmup: float = 0.0  # seconds at the beginning that do not count
    cooldown: float = 0.0  # seconds at the end that do not count
    seed: int = 0  # for arrivals, and for choosing the answers to verify
    timeout: float = 60.0  # seconds from sending a request
    slo: Slo | None = None
    verify: float = 0.0  # share of the answers that is asked again, alone
    keep_answers: bool = False
    num_processes: int = 1
    admin_address: str | None = None  # tells the server's load; None: the server's own address
    stop_when_missed: bool = False  # end as soon as the bounds cannot be kept any more

    def __post_init__(self) -> None:
        """Raise LoadTestError for settings that do not fit together; options bound each alone."""
        if self.num_requests is None and self.duration is None and self._is_endless:
            raise LoadTestError("the test has no end; give a number of requests or a duration")
        if self.cooldown and self.duration is None:
            raise LoadTestError(
                f"cooldown ({self.cooldown}) counts from the end of a duration; give one"
            )
        if self.duration is not None and self.warmup + self.cooldown >= self.duration:
            raise LoadTestError(
                f"warmup ({self.warmup}) and cooldown ({self.cooldown}) must leave something of "
                f"the duration ({self.duration} s)"
            )
        if isinstance(self.arrival, ClosedLoop) and self.arrival.concurrency < self.num_processes:
            raise LoadTestError(
                f"concurrency ({self.arrival.concurrency}) must be at least num_processes "
                f"({self.num_processes}), or some have nothing to do"
            )

    @property
    def _is_endless(self) -> bool:
        return isinstance(self.arrival, ClosedLoop | OpenLoop)

    @property
    def window_end(self) -> float | None:
        """Seconds from the start until which requests count; None: until the last has ended."""
        return None if self.duration is None else self.duration - self.cooldown
