"""Workers of the registry, and what a gateway remembers of them."""

from __future__ import annotations

import asyncio
from typing import cast

from server.gateway.gateway import Gateway
from server.ray.follow import follow, kill_hung
from server.ray.registry import Registry, WorkerInfo
from server.ray.thread import RayThread
from tests.fakes.calls import until


class _Gateway:
    def __init__(self) -> None:
        self.workers: list[str] = []

    async def sync(self, workers: list[str]) -> None:
        self.workers = workers


class _Ray:
    def __init__(self) -> None:
        self.asked: list[object] = []

    async def run(self, *asked: object) -> None:
        self.asked.append(asked[-1])


async def test_workers_that_have_left_can_be_killed_for_a_while_and_are_then_forgotten() -> None:
    registry, gateway, ray = Registry(time_to_live=60), _Gateway(), _Ray()
    seen: dict[str, WorkerInfo] = {}
    task = asyncio.create_task(follow(registry, cast(Gateway, gateway), seen))
    stays = WorkerInfo("127.0.0.1:1", pid=1, replica_id="stays")
    registry.put(stays)

    for number in range(2, 302):
        comes = WorkerInfo(f"127.0.0.1:{number}", pid=number, replica_id="", actor=f"a{number}")
        registry.put(comes)
        await until(lambda: len(gateway.workers) == 2)
        registry.drop(comes)
        await until(lambda: len(gateway.workers) == 1)
    for address in ("127.0.0.1:301", "127.0.0.1:2"):  # the last one, and one long forgotten
        await kill_hung(cast(RayThread, ray), seen, address)
    task.cancel()

    assert ray.asked == ["a301"]
    assert seen["127.0.0.1:1"] == stays
    assert len(seen) < 200
