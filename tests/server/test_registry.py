"""The table of living workers."""

from __future__ import annotations

import asyncio

from server.ray.registry import Registry, WorkerInfo

FIRST = WorkerInfo("127.0.0.1:1", pid=1, replica_id="a")
SECOND = WorkerInfo("127.0.0.1:2", pid=2, replica_id="b")


async def test_new_worker_is_told_at_once_to_who_waits() -> None:
    registry = Registry()
    waiting = asyncio.create_task(registry.changed(()))
    await asyncio.sleep(0)

    registry.put(FIRST)

    assert await asyncio.wait_for(waiting, 1) == (FIRST,)


async def test_who_has_seen_less_is_told_at_once() -> None:
    registry = Registry()
    registry.put(FIRST)
    registry.put(SECOND)

    assert await asyncio.wait_for(registry.changed((FIRST,)), 1) == (FIRST, SECOND)


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

    assert await asyncio.wait_for(registry.changed((FIRST,)), 5) == ()


async def test_worker_that_renews_outlives_its_time_to_live() -> None:
    registry = Registry(time_to_live=1)
    registry.put(FIRST)

    for _ in range(12):
        await asyncio.sleep(0.1)
        registry.put(FIRST)

    assert registry.workers == (FIRST,)
