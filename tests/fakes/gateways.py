"""A gateway before workers, what it counts, and an entry of a file of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.gateway.losses import HasCrashed
from tests.fakes.calls import Stubs, stubs_for


@asynccontextmanager
async def running_gateway(
    *workers: str,
    config: GatewayConfig | None = None,
    lost: Callable[[str], Awaitable[None]] | None = None,
    has_crashed: HasCrashed = lambda address: None,
) -> AsyncIterator[tuple[Gateway, Stubs]]:
    gateway = Gateway(config or GatewayConfig(worker_wait=60), lost, has_crashed=has_crashed)
    port = await gateway.start()
    await gateway.pool.sync(workers)
    try:
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            yield gateway, stubs
    finally:
        await gateway.close()


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
