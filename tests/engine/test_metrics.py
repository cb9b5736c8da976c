"""The decaying rate."""

from __future__ import annotations

import pytest

from engine.metrics import DecayingLeast, DecayingRate


def test_a_steady_rate_is_told_from_the_first_seconds_on() -> None:
    rate = DecayingRate(window=5.0)
    for n in range(30):
        rate.add(3, n * 0.1)

    assert rate.at(2.9) == pytest.approx(30, rel=0.1)


def test_the_rate_falls_while_nothing_happens() -> None:
    rate = DecayingRate(window=5.0)
    for n in range(100):
        rate.add(1, n * 0.1)

    assert rate.at(60.0) < 0.01


def test_nothing_yet_is_no_rate() -> None:
    assert DecayingRate().at(5.0) == 0.0


def test_the_least_falls_at_once_and_rises_slowly() -> None:
    least = DecayingLeast(window=10.0)
    for when, value in enumerate((5.0, 2.0, 4.0)):
        least.add(value, float(when))

    assert least.value == pytest.approx(2.0 + 2.0 * 0.095, rel=0.01)


def test_the_least_comes_to_what_all_values_are() -> None:
    least = DecayingLeast(window=10.0)
    least.add(1.0, 0.0)
    for second in range(1, 60):
        least.add(3.0, float(second))

    assert least.value == pytest.approx(3.0, rel=0.01)
