"""The table of living workers."""

from __future__ import annotations

import asyncio

import pytest

from server.ray.registry import Registry, WorkerInfo
from tests.fakes.clock import FakeClock

FIRST = WorkerInfo("127.0.0.1:1", pid=1, replica_id="a")
SECOND = WorkerInfo("127.0.0.1:2", pid=2, replica_id="b")


async def test_new_worker_is_told_at_once_to_who_waits() -> None:
    registry = Registry()
    waiting = asyncio.create_task(registry.changed(()))
    await asyncio.sleep(0)

    registry.put(FIRST)

    assert await asyncio.wait_for(waiting, 60) == (FIRST,)


async def test_who_has_seen_less_is_told_at_once() -> None:
    registry = Registry()
    registry.put(FIRST)
    registry.put(SECOND)

    assert await asyncio.wait_for(registry.changed((FIRST,)), 60) == (FIRST, SECOND)


async def test_renewal_changes_nothing() -> None:
    registry = Registry()
    registry.put(FIRST)
    waiting = asyncio.create_task(registry.changed((FIRST,)))
    await asyncio.sleep(0)

    registry.put(FIRST)
    await asyncio.sleep(0.05)

    assert not waiting.done()
    waiting.cancel()


async def test_worker_that_leaves_is_forgotten_at_once() -> None:
    registry = Registry()
    registry.put(FIRST)
    registry.put(SECOND)

    registry.drop(FIRST)

    assert await registry.changed((FIRST, SECOND)) == (SECOND,)


async def test_worker_without_heartbeat_is_forgotten_after_its_time_to_live() -> None:
    registry = Registry(time_to_live=0.1)
    registry.put(FIRST)

    assert await asyncio.wait_for(registry.changed((FIRST,)), 60) == ()


async def test_worker_that_renews_outlives_its_time_to_live(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    registry = Registry(time_to_live=1)
    seen = []

    for pause in (0.0, 0.9, 0.9, 0.9, 1.1):
        clock.now += pause
        for _ in range(2):  # timers come behind who waits
            await asyncio.sleep(0)
        seen.append(registry.workers)
        registry.put(FIRST)

    assert seen == [(), (FIRST,), (FIRST,), (FIRST,), ()]
