"""Keeps the workers of a gateway equal to those that live, and ends those that hang."""

from __future__ import annotations

import contextlib
import logging

from server.gateway.gateway import Gateway
from server.ray.registry import Registry, WorkerInfo
from server.ray.thread import RayThread

_MAX_LEFT = 100  # workers that have left and can still be killed, if they are found to hang
logger = logging.getLogger(__name__)


async def follow(registry: Registry, gateway: Gateway, seen: dict[str, WorkerInfo]) -> None:
    """Keep the gateway's workers equal to the registry's; note all by address in `seen`.

    The last of those that have left stay in it: a worker hangs once it is heard no more.
    """
    known: tuple[WorkerInfo, ...] = ()
    while True:
        workers = await registry.changed(known)
        seen.update((worker.address, worker) for worker in workers)
        left = seen.keys() - {worker.address for worker in workers}
        for address in [address for address in seen if address in left][:-_MAX_LEFT]:
            del seen[address]
        await gateway.sync([worker.address for worker in workers])
        for worker in set(workers) - set(known):
            logger.info("joined: %s", worker)
        for worker in set(known) - set(workers):
            logger.info("left: %s", worker)
        known = workers


async def kill_hung(ray: RayThread, seen: dict[str, WorkerInfo], address: str) -> None:
    """Have Ray kill a worker that hangs: it does not stop when it is asked to."""
    if (worker := seen.pop(address, None)) is None:
        return
    logger.info("killed: %s", worker)
    await ray.run(_kill_actor, worker.actor)


def _kill_actor(name: str) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
        ray.kill(ray.get_actor(name, namespace="serve"))
