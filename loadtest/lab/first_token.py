"""How much later than from the engine the first token comes: through a worker, and a gateway."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.lab.overhead_stages import start_parts
from loadtest.lab.overload import prompts
from loadtest.lab.stand_in.model import NAME
from loadtest.metrics import RequestRecord
from loadtest.runner import LoadTest
from loadtest.work.ask import texts

_STAND_IN = "0.0005"  # seconds of a row, of a model that computes nothing
_WARM_UP = 64  # requests
_NUM_TOKENS = 16  # per output at most; a date has fewer


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token with so many streams, in milliseconds: medians, of added also p90."""

    model: str
    stage: str
    num_streams: int
    num_requests: int
    client: float
    engine: float
    added: float
    added_p90: float


def measure_first_token(
    package: Path | None, num_streams: int, num_requests: int, stage: str = "gateway"
) -> FirstToken:
    """Measure a closed loop on a package that takes dates; on a model that only waits, if None.

    It is asked of a worker, or in the stage `gateway` of what is in front of that.
    """
    argument, name = (_STAND_IN, "stand-in") if package is None else (str(package), package.name)
    with ExitStack() as stack:
        address = start_parts(stack, stage, num_streams, argument)[stage].address
        _closed_loop(address, num_streams, max(_WARM_UP, num_streams), seed=1)
        records = _closed_loop(address, num_streams, num_requests, seed=2)
    return first_token_of(name, stage, num_streams, records)


def first_token_of(
    model: str, stage: str, num_streams: int, records: Sequence[RequestRecord]
) -> FirstToken:
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
        stage,
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
    return LoadTest(config, texts(prompts(seed), max_new_tokens=_NUM_TOKENS)).run().records
