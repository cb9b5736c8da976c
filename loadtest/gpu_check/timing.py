"""Times of work that is queued on a stream: of the whole, and of the host alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.gpu_check.gpu_use import GpuUse

_NUM_TURNS = 3
_FEWEST_RUNS = 3  # in a turn
_BURST = 20  # runs that a stream takes in without letting the host wait
_FASTEST = 1e-6  # seconds that a run is taken to last at least


@dataclass(frozen=True)
class Timed:
    """Medians over turns, in microseconds a run."""

    total: float  # until the device was done, over all runs of a turn
    host: float  # until the last of a few runs was queued
    busy: float | None  # share of the time in which the device computed; None: not known


def time_in_turns(
    works: Mapping[str, Callable[[], object]],
    wait: Callable[[], None],
    *,
    seconds: float,
) -> dict[str, Timed]:
    """Measure each work in turn, again and again: whatever disturbs one disturbs all.

    In a turn a work is run as often as takes about so many seconds, but a few times at least, and
    then in a short burst, of which the host's share is taken.
    """
    num_runs = {name: _num_runs(work, wait, seconds) for name, work in works.items()}
    turns: dict[str, list[Timed]] = {name: [] for name in works}
    for _ in range(_NUM_TURNS):
        for name, work in works.items():
            whole, burst = _time(work, wait, num_runs[name]), _time(work, wait, _BURST)
            turns[name].append(Timed(whole.total, burst.host, whole.busy))
    return {name: _median(seen) for name, seen in turns.items()}


def _num_runs(work: Callable[[], object], wait: Callable[[], None], seconds: float) -> int:
    """Warm up, and return how often a work runs in so many seconds."""
    _time(work, wait, _FEWEST_RUNS)
    pace = _time(work, wait, _FEWEST_RUNS).total * 1e-6
    return max(_FEWEST_RUNS, round(seconds / max(pace, _FASTEST)))


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
