"""How far a proof has come, and how long the rest takes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from exporter.prover import progress
from exporter.prover.progress import Meter, seconds_for
from tests.fakes.clock import FakeClock

Told = tuple[int, int, str, float | None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> tuple[Meter, list[Told]]:
    """A meter of work that is expected to take 100 seconds, and what it tells."""
    found: list[Told] = []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    return Meter(lambda *said: found.append(said), 1000.0, 100.0), found


def test_at_first_it_takes_as_long_as_was_expected_and_then_as_it_went(
    told: tuple[Meter, list[Told]], clock: FakeClock
) -> None:
    meter, found = told

    for work, seconds in ((10, 3), (30, 5), (60, 12), (900, 180)):
        clock.now += seconds
        meter.add(work, "beams", 150)

    assert found == [
        (1, 150, "beams", 97),
        (6, 150, "beams", 92),
        (15, 150, "beams", 180),
        (150, 150, "beams", 0),
    ]


def test_it_tells_no_more_cases_than_there_are_nor_less_than_no_time(
    told: tuple[Meter, list[Told]], clock: FakeClock
) -> None:
    meter, found = told

    clock.now += 500
    meter.add(1, "beams", 150)
    meter.add(5000, "beams", 150)

    assert found == [(0, 150, "beams", 0), (150, 150, "beams", 0)]


def test_a_larger_model_and_a_slower_machine_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_machine(seconds: float, num_parameters: int) -> float:
        clock = SimpleNamespace(perf_counter=itertools.count(0, seconds).__next__)
        monkeypatch.setattr(progress, "time", clock)
        progress._operations_per_second.cache_clear()
        return seconds_for(10_000, num_parameters)

    tiny, fast, slow = (on_a_machine(*one) for one in ((0.02, 10**4), (0.02, 10**9), (0.2, 10**9)))

    assert tiny == pytest.approx(0.1, rel=0.05)  # calls, and no arithmetic
    progress._operations_per_second.cache_clear()
    assert slow == pytest.approx(10 * fast, rel=0.01) and 100 < fast < 300
