"""When requests are sent: as answers come, at a rate, or as a trace says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtest.arrival.rates import Rates, Times
from loadtest.errors import LoadTestError

Process = Literal["poisson", "constant", "gamma"]

_MAX_ARRIVALS = 10**8


@dataclass(frozen=True)
class ClosedLoop:
    """Each of `concurrency` users waits for an answer before the next request.

    So a slow server is asked less, and a stall hides.
    """

    concurrency: int
    name: Literal["closed"] = "closed"

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at a time"


@dataclass(frozen=True)
class OpenLoop:
    """Requests are sent when they are due, however many are still running.

    That is what a server meets from many independent users.
    """

    rates: Rates
    process: Process = "poisson"
    burstiness: float = 1.0  # shape of gamma gaps: 1 is Poisson, below 1 comes in bursts
    name: Literal["open"] = "open"

    def __str__(self) -> str:
        return f"open loop, {self.rates} requests/s, {self.kind} arrivals"

    @property
    def kind(self) -> str:
        """The kind of arrivals, in words."""
        return f"gamma {self.burstiness:g}" if self.process == "gamma" else self.process

    def times(self, num_requests: int | None, duration: float | None, seed: int) -> Times:
        """Return when requests are due, in seconds; the first at once, the same for a seed.

        Gaps are those of the process at a rate of 1, stretched to the rate of their time. A ramp
        or steps without a duration take as long as `num_requests` need at the mean rate.
        """
        span = duration if duration is not None else (num_requests or 0) / self.rates.mean
        expected = max(self.rates.values) * span
        if expected > _MAX_ARRIVALS:
            raise LoadTestError(
                f"{self.rates} requests/s for {span:g} s are more than {_MAX_ARRIVALS:,} requests; "
                "give a lower rate or a shorter time"
            )
        generator = np.random.default_rng(seed)
        count = num_requests or int(expected + 10 * math.sqrt(expected) + 10)
        counts = np.append(0.0, np.cumsum(self._gaps(generator, count - 1)))
        while num_requests is None and counts[-1] < expected:  # long gaps were few: draw on
            counts = np.append(counts, counts[-1] + np.cumsum(self._gaps(generator, count)))
        found = self.rates.times(counts, span)
        return found if duration is None else found[found < duration]

    def _gaps(self, generator: np.random.Generator, count: int) -> Times:
        """Return gaps with a mean of 1."""
        match self.process:
            case "constant":
                return np.ones(count)
            case "gamma":
                return generator.gamma(self.burstiness, 1 / self.burstiness, count)
            case _:
                return generator.exponential(1.0, count)


@dataclass(frozen=True)
class Replay:
    """Requests are sent at the times of a trace."""

    speed: float = 1.0  # 2: twice as fast as it was
    name: Literal["trace"] = "trace"

    def __str__(self) -> str:
        return f"trace at {self.speed:g} times its speed"

    def times(self, recorded: tuple[float, ...], duration: float | None) -> Times:
        """Return when the requests of a trace are due; LoadTestError if it has no times."""
        if not recorded:
            raise LoadTestError(
                "the requests have no times to replay; give each line an `at` in seconds, or "
                "another --arrival"
            )
        found = (np.array(recorded) - recorded[0]) / self.speed
        return found if duration is None else found[found < duration]


Arrival = ClosedLoop | OpenLoop | Replay
