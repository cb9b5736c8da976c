"""The learning rate rises linearly and falls with the inverse square root of the step."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from exporter.training.schedule import InverseSquareRootSchedule


def test_the_peak_is_reached_at_the_end_of_warm_up() -> None:
    schedule = InverseSquareRootSchedule(peak=0.002, warmup_steps=100)

    rates = [schedule.learning_rate(step) for step in range(1, 1001)]

    assert rates[0] == pytest.approx(0.00002)
    assert max(rates) == rates[99] == 0.002
    assert rates[:100] == sorted(rates[:100])
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[399] == pytest.approx(0.001)


@pytest.mark.parametrize("step", [1, 17, 3999, 4000, 4001, 100_000])
def test_it_is_the_formula_of_the_paper(step: int) -> None:
    schedule = InverseSquareRootSchedule(2.0 * (512 * 4000) ** -0.5, 4000)

    expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)

    assert schedule.learning_rate(step) == pytest.approx(expected)


@pytest.mark.parametrize("step", [1, 9, 10, 11, 100, 9_999, 10_001, 10**6])
def test_with_a_floor_it_is_never_below_that_share_of_the_peak(step: int) -> None:
    schedule = InverseSquareRootSchedule(peak=0.002, warmup_steps=100, floor=0.1)

    expected = 0.002 * max(0.1, min(step / 100, (100 / step) ** 0.5))

    assert schedule.learning_rate(step) == pytest.approx(expected)
    assert schedule.learning_rate(step) >= 0.0002


@pytest.mark.parametrize(
    ("peak", "warmup", "floor"),
    [(0.0, 10, 0.0), (-1.0, 10, 0.0), (0.1, 0, 0.0), (0.1, 10, -0.1), (0.1, 10, 1.1)],
)
def test_impossible_values_are_refused(peak: float, warmup: int, floor: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        InverseSquareRootSchedule(peak, warmup, floor)
