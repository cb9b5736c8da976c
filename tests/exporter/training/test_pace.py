"""Those who watch a training run are told its loss, its speed and how long the rest takes."""

from __future__ import annotations

import pytest

from exporter.training.pace import Pace
from tests.fakes.clock import FakeClock


def test_a_loss_soon_forgets_the_first_and_speed_counts_from_the_start() -> None:
    clock = FakeClock()
    pace = Pace(clock)

    for step in range(20):
        clock.now += 0.5
        pace.add(8.0 if step == 0 else 1.0, 400)

    loss, speed = str(pace).split(", ")
    assert 1 < float(loss.removeprefix("loss ")) < 2 and speed == "800 tokens/s"
    assert pace.seconds_for(480) == pytest.approx(240)
