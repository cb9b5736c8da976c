"""The table of living workers."""

from __future__ import annotations

import asyncio

from server.registry import Registry, WorkerInfo

FIRST = WorkerInfo("127.0.0.1:1", pid=1, replica_id="a")
SECOND = WorkerInfo("127.0.0.1:2", pid=2, replica_id="b")


async def test_new_worker_is_told_at_once_to_who_waits() -> None:
    registry = Registry(time_to_live=10, settle=0)
    version, before = await registry.changed(-1)
    waiting = asyncio.create_task(registry.changed(version, timeout=10))

    await registry.put(FIRST)
    _, after = await asyncio.wait_for(waiting, 1)

    assert (before, after) == ((), (FIRST,))


async def test_renewal_changes_nothing() -> None:
    registry = Registry(time_to_live=10, settle=0)
    await registry.put(FIRST)
    version, _ = await registry.changed(-1)

    await registry.put(FIRST)

    assert await registry.changed(version, timeout=0.05) == (version, (FIRST,))


async def test_worker_that_leaves_is_forgotten_at_once() -> None:
    registry = Registry(time_to_live=10, settle=0)
    await registry.put(FIRST)
    await registry.put(SECOND)

    await registry.drop(FIRST)

    assert (await registry.changed(-1))[1] == (SECOND,)


async def test_worker_that_leaves_is_told_whether_all_is_over() -> None:
    registry = Registry(time_to_live=10, settle=0)
    await registry.put(FIRST)
    await registry.put(SECOND)

    before = await registry.drop(FIRST)
    await registry.end()
    after = await registry.drop(SECOND)

    assert (before, after) == (False, True)


async def test_worker_without_heartbeat_is_forgotten_after_its_time_to_live() -> None:
    registry = Registry(time_to_live=0.1, settle=0)
    await registry.put(FIRST)
    version, before = await registry.changed(-1)

    _, after = await registry.changed(version, timeout=5)

    assert (before, after) == ((FIRST,), ())


async def test_restarted_registry_answers_only_after_every_worker_could_renew() -> None:
    restarted = Registry(time_to_live=10, settle=0.2)
    waiting = asyncio.create_task(restarted.changed(-1))

    await asyncio.sleep(0.05)
    await restarted.put(FIRST)
    await asyncio.sleep(0.05)
    await restarted.put(SECOND)

    assert set((await waiting)[1]) == {FIRST, SECOND}


async def test_versions_of_an_earlier_life_do_not_come_again() -> None:
    first_life = Registry(settle=0)
    seen, _ = await first_life.changed(-1)

    second_life = Registry(settle=0)

    assert (await second_life.changed(-1))[0] > seen
