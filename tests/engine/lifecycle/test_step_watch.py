"""A step that takes too long is seen; how long it may take depends on the model, too."""

from __future__ import annotations

import pytest

from engine.lifecycle.step_watch import StepWatch
from tests.fakes.clock import FakeClock


def test_a_step_is_over_after_the_limit_and_a_finished_one_never() -> None:
    clock = FakeClock(0.0)
    watch = StepWatch("m", 8.0, clock)

    with watch:
        clock.now = 8.0
        assert not watch.is_over
        clock.now = 8.1
        assert watch.is_over
    assert not watch.is_over


@pytest.mark.parametrize(("largest", "limit"), [(0.0, 8.0), (2.0, 8.0), (2.5, 10.0), (100, 400)])
def test_a_step_may_take_four_times_the_largest_of_the_trial(
    largest: float, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(0.0)
    watch = StepWatch("slow", 8.0, clock)

    watch.allow(largest)

    with watch:
        clock.now = limit
        assert not watch.is_over
        clock.now = limit + 0.1
        assert watch.is_over
    said = [f"counts as hung after {limit:.3g} s"] if limit > 8 else []
    assert all(part in caplog.text for part in said)
    assert bool(caplog.records) == (limit > 8)


def test_a_step_without_a_limit_keeps_none() -> None:
    watch = StepWatch("m", float("inf"), clock := FakeClock(0.0))

    watch.allow(100)

    with watch:
        clock.now = 1e9
        assert not watch.is_over
