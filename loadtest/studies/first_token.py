"""How much later than from the engine the first token comes, through a gateway and a worker."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.metrics import RequestRecord
from loadtest.runner import run
from loadtest.studies.overhead_stages import part
from loadtest.studies.overload import prompts
from loadtest.studies.stand_in import NAME
from loadtest.work.ask import texts

_STAND_IN = "0.0005 a row"  # what a step takes of a model that computes nothing
_WARM_UP = 64  # requests
_NUM_TOKENS = 16  # of an output at most; a date has fewer


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token with so many streams, in milliseconds: medians, of added also p90."""

    model: str
    num_streams: int
    num_requests: int
    client: float
    engine: float
    added: float
    added_p90: float


def measure_first_token(package: Path | None, num_streams: int, num_requests: int) -> FirstToken:
    """Measure a closed loop on a package that takes dates; on a model that only waits, if None."""
    argument, name = (_STAND_IN, "stand-in") if package is None else (str(package), package.name)
    with part("worker", num_streams, argument) as worker:
        with part("gateway", num_streams, worker.address) as gateway:
            _closed_loop(gateway.address, num_streams, max(_WARM_UP, num_streams), seed=1)
            records = _closed_loop(gateway.address, num_streams, num_requests, seed=2)
    return first_token_of(name, num_streams, records)


def first_token_of(model: str, num_streams: int, records: Sequence[RequestRecord]) -> FirstToken:
    """Return what a client waited for first tokens, beside what their engine says of each.

    Raises LoadTestError if a request had none.
    """
    times = [
        (1e3 * record.time_to_first_token, 1e3 * record.server_first_token)
        for record in records
        if record.time_to_first_token is not None and record.server_first_token is not None
    ]
    if len(times) < len(records):
        raise LoadTestError(f"{len(records) - len(times)} of {len(records)} requests had no token")
    added = sorted(client - engine for client, engine in times)
    return FirstToken(
        model,
        num_streams,
        len(times),
        client=statistics.median(client for client, _ in times),
        engine=statistics.median(engine for _, engine in times),
        added=statistics.median(added),
        added_p90=added[int(0.9 * len(added))],
    )


def _closed_loop(
    address: str, num_streams: int, num_requests: int, seed: int
) -> Sequence[RequestRecord]:
    config = LoadConfig(address, NAME, ClosedLoop(num_streams), num_requests=num_requests)
    return run(config, texts(prompts(seed), max_new_tokens=_NUM_TOKENS)).records
