"""Times of work that is queued on a stream: of the whole, and of the host alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.gpu_check.gpu_use import GpuUse

_WARM_UP = 3  # runs before the clock


@dataclass(frozen=True)
class Timed:
    """Medians over turns, in microseconds a run."""

    total: float  # until the device was done, over all runs of a turn
    host: float  # until the last run was queued
    busy: float | None  # share of the time in which the device computed; None: not known


def time_in_turns(
    works: Mapping[str, Callable[[], object]],
    wait: Callable[[], None],
    *,
    num_runs: int,
    num_turns: int,
) -> dict[str, Timed]:
    """Measure each work in turn, again and again: whatever disturbs one disturbs all."""
    turns: dict[str, list[Timed]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(_WARM_UP):
            work()
        wait()
    for _ in range(num_turns):
        for name, work in works.items():
            turns[name].append(_time(work, wait, num_runs))
    return {name: _median(seen) for name, seen in turns.items()}


def _time(work: Callable[[], object], wait: Callable[[], None], num_runs: int) -> Timed:
    with GpuUse() as use:
        started = time.perf_counter()
        for _ in range(num_runs):
            work()
        queued = time.perf_counter()
        wait()
        ended = time.perf_counter()
    return Timed(1e6 * (ended - started) / num_runs, 1e6 * (queued - started) / num_runs, use.busy)


def _median(turns: list[Timed]) -> Timed:
    busy = [turn.busy for turn in turns if turn.busy is not None]
    return Timed(
        statistics.median(turn.total for turn in turns),
        statistics.median(turn.host for turn in turns),
        statistics.median(busy) if busy else None,
    )
