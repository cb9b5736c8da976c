"""A gateway before workers, alone or as a cell, what it counts, an entry of a file of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.worker.worker import Worker
from tests.fakes.calls import Stubs, stubs_for, until
from tests.fakes.engines import FakeGenerator, FakePredictor, running_worker

Engine = FakeGenerator | FakePredictor


@asynccontextmanager
async def running_gateway(
    *workers: str,
    config: GatewayConfig | None = None,
    lost: Callable[[str], Awaitable[None]] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Gateway, Stubs]]:
    gateway = Gateway(config or GatewayConfig(worker_wait=60), lost, **more)
    port = await gateway.start()
    await gateway.pool.sync(workers)
    try:
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            yield gateway, stubs
    finally:
        await gateway.close()


@dataclass
class Cell:
    """A gateway before workers in this process."""

    gateway: Gateway
    stubs: Stubs
    engines: tuple[Any, ...]  # the first of every worker
    workers: tuple[Worker, ...]
    addresses: tuple[str, ...]  # the workers'; that of the gateway is the stubs'

    def requests(self) -> list[int]:
        """Return how many came to each worker."""
        return [len(engine.requests) for engine in self.engines]


@asynccontextmanager
async def running_cell(
    *groups: Engine | tuple[Engine, ...], config: GatewayConfig | None = None, **more: Any
) -> AsyncIterator[Cell]:
    """Serve each engine, or each few, at a worker; yield when all of them serve."""
    engines = [group if isinstance(group, tuple) else (group,) for group in groups]
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(running_worker(*group)) for group in engines]
        workers, addresses = zip(*found, strict=True)
        gateway, stubs = await stack.enter_async_context(
            running_gateway(*addresses, config=config, **more)
        )
        await until(lambda: gateway.pool.num_serving == len(groups))
        yield Cell(gateway, stubs, tuple(group[0] for group in engines), workers, addresses)


def counted(gateway: Gateway, name: str) -> float:
    """Return what a gateway counts under this name."""
    (value,) = (value for found, _, value in gateway.snapshot() if found == name)
    assert not isinstance(value, list)
    return value


num_running = partial(counted, name="gateway_requests_running")
num_waiting = partial(counted, name="gateway_requests_waiting")


def entry(token: str, **fields: Any) -> str:
    lines = [f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"']
    lines += [f"{name} = {value!r}" for name, value in fields.items()]
    return "\n".join(["[[token]]", *lines, ""])
