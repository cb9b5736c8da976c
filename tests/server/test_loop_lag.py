"""How late an event loop is, from what was measured of late."""

from __future__ import annotations

import asyncio
import time

from server.loop_lag import PERIOD, LoopLag


def test_one_late_moment_is_not_the_rule() -> None:
    lag = LoopLag()
    for late in (0.001, 0.9, 0.001, 0.002, 0.001):
        lag.take(late)

    assert lag.seconds == 0.001


async def test_a_loop_that_others_keep_busy_is_late() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    while not lag.seconds:
        await asyncio.sleep(0)
        time.sleep(2 * PERIOD)
    watching.cancel()

    assert lag.seconds >= PERIOD / 2
