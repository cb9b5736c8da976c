"""The learning rate rises linearly and falls with the inverse square root of the step."""

from __future__ import annotations

import pytest

from exporter.training.task import Recipe


def recipe(peak: float, warmup_steps: int, steps: int = 1_000_000) -> Recipe:
    return Recipe(steps, batch_tokens=1, peak_learning_rate=peak, warmup_steps=warmup_steps)


def test_the_peak_is_reached_at_the_end_of_warm_up() -> None:
    given = recipe(0.002, 100)

    rates = [given.learning_rate(step, given.steps) for step in range(1, 1001)]

    assert rates[0] == pytest.approx(0.00002)
    assert max(rates) == rates[99] == 0.002
    assert rates[:100] == sorted(rates[:100])
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[399] == pytest.approx(0.001)


@pytest.mark.parametrize("step", [1, 17, 3999, 4000, 4001, 100_000])
def test_it_is_the_formula_of_the_paper(step: int) -> None:
    given = recipe(2.0 * (512 * 4000) ** -0.5, 4000)

    expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)

    assert given.learning_rate(step, given.steps) == pytest.approx(expected)
