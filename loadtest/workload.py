"""What a load test asks of a server, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import JsonValue

from loadtest.errors import LoadTestError

_MAX_PROMPT_BYTES = 2**28

Arrival = Literal["poisson", "constant"]


@dataclass(frozen=True)
class LoadConfig:
    """A load test: open loop if `rate` is given, closed loop if `concurrency` is.

    In an open loop requests are sent when they are due, however many are still running: what a
    server meets from many independent users. In a closed loop each of `concurrency` users waits for
    an answer before the next request, so that a slow server is asked less.
    """

    address: str  # "host:port"
    model: str
    prompts: tuple[str, ...]  # used in turn; for a model of images, paths of their files
    num_requests: int
    rate: float | None = None  # requests per second
    arrival: Arrival = "poisson"  # of an open loop
    concurrency: int | None = None
    seed: int = 0  # of the arrivals
    timeout: float = 60.0  # seconds from sending a request
    options: Mapping[str, JsonValue] = field(default_factory=dict)  # of the client's generate

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise LoadTestError(
                f"rate ({self.rate}) and concurrency ({self.concurrency}): give one of them, "
                "a rate for an open loop or a concurrency for a closed one"
            )
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise LoadTestError(f"rate ({self.rate}) must be above 0 requests per second")
        if self.concurrency is not None and self.concurrency < 1:
            raise LoadTestError(f"concurrency ({self.concurrency}) must be at least 1")
        if self.arrival not in ("poisson", "constant"):
            raise LoadTestError(f"arrival ({self.arrival!r}) must be poisson or constant")
        if self.num_requests < 1:
            raise LoadTestError(f"num_requests ({self.num_requests}) must be at least 1")
        if not self.timeout > 0:
            raise LoadTestError(f"timeout ({self.timeout}) must be above 0 seconds")
        if not self.prompts:
            raise LoadTestError("there are no prompts; give at least one")

    @property
    def load(self) -> str:
        """The load in words, for titles."""
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s, {self.arrival} arrivals"
        return f"closed loop, {self.concurrency} at a time"


def arrival_times(config: LoadConfig) -> list[float]:
    """Return when each request of an open loop is due, in seconds from the start.

    The first is due at once. Gaps are 1 / rate, or exponential with that mean for Poisson
    arrivals; the same seed gives the same gaps.
    """
    if config.rate is None:
        raise LoadTestError("a closed loop has no arrival times")
    mean_gap = 1.0 / config.rate
    num_gaps = config.num_requests - 1
    if config.arrival == "constant":
        gaps = np.full(num_gaps, mean_gap)
    else:
        gaps = np.random.default_rng(config.seed).exponential(mean_gap, num_gaps)
    return [0.0, *np.cumsum(gaps).tolist()]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file that are not blank."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_PROMPT_BYTES + 1)
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"cannot read prompts, one a line, from {path}: {error}") from error
    if len(raw) > _MAX_PROMPT_BYTES:
        raise LoadTestError(f"{path} has more than {_MAX_PROMPT_BYTES:,} bytes; give fewer prompts")
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise LoadTestError(f"{path} has no prompt; write one a line")
    return prompts
