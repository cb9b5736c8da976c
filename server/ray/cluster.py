"""Ray itself: one of our own on this machine, or a cluster that is joined."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial

from engine.background import beside
from engine.errors import ConfigError
from server.ray.address import connect_once, joins_cluster, not_joined
from server.ray.claim import NAMESPACE, claim_name
from server.ray.internals import Table
from server.ray.processes.local import LocalRay
from server.ray.processes.run_directory import remove_what_dead_owners_left, run_directory
from server.ray.resources import check_gpus_of_cluster
from server.ray.thread import RayThread, watch
from server.settings import Settings


@contextlib.asynccontextmanager
async def running_ray(config: Settings) -> AsyncIterator[RayThread]:
    """Start Ray, or join a cluster; notice its loss; leave nothing behind."""
    remove_what_dead_owners_left()
    async with contextlib.AsyncExitStack() as stack:
        ray, local = stack.enter_context(RayThread()), None
        if not joins_cluster():
            local = LocalRay(stack.enter_context(run_directory()) / "ray")
            stack.callback(local.end)
        stack.push_async_callback(ray.finish, _stop_ray)
        await ray.run(_start_ray, config, local)
        await ray.run(check_gpus_of_cluster, config)
        if threading.current_thread() is threading.main_thread():  # Ray has put its own before it
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        claim = await ray.run(claim_name, config.listen.name) if local is None else None
        stack.callback(lambda: claim)  # held until then
        watching = partial(watch, await ray.run(_servers), ray.lose)
        await stack.enter_async_context(beside("watching Ray", watching))
        yield ray


def table_of(service: str) -> Table:
    """Return the table of keys of a service on the cluster that this process is connected to."""
    import ray

    return Table(ray.get_runtime_context().gcs_address, service)


def node_address() -> str:
    """Return the IP address of this host in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def _start_ray(config: Settings, local: LocalRay | None) -> None:
    """Join the cluster of RAY_ADDRESS, or a Ray of our own, once it runs."""
    # Under `uv run` Ray would pack the current folder, models and all, and upload it for workers.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if local is not None:
        local.start(config)
    import ray  # reads the prepared environment, while the other one starts

    address = os.environ["RAY_ADDRESS"] if local is None else local.address()
    try:
        if local is None:
            connect_once(address)
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except OSError as error:
        if local is not None:
            raise
        raise ConfigError(not_joined(address, error)) from error


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _servers() -> dict[str, tuple[str, int]]:
    """Return host and port of the servers of Ray that this process cannot do without."""
    import ray

    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    (node,) = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return {
        "gcs_server": (host.strip("[]"), int(port)),
        "raylet": (node["NodeManagerAddress"], node["NodeManagerPort"]),
    }
