"""Runs workers as Ray Serve replicas behind a gateway: the only file that knows Ray.

    command's process                       Ray
    serving() ── Gateway ◄── long poll ── Registry ◄── heartbeat ── WorkerReplica, one a process
                    └───────────────── gRPC ─────────────────────────► Worker, its engines

Ray Serve places, health-checks, restarts and scales the replicas. Requests never pass through
Ray: every replica opens its own gRPC server and tells the registry where; the gateway follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

from engine.errors import ConfigError, EngineFailure
from engine.factory import load_engine
from engine.package import load_package
from server.background import in_background
from server.catalog import Engine
from server.config import ServeConfig
from server.gateway import Gateway
from server.registry import HEARTBEAT, Registry, WorkerInfo
from server.signals import cancelled_by_signals
from server.worker import Worker, address_of

DEREGISTERED_PAUSE = 0.3  # seconds for gateways to see that a replica goes, before it refuses
UNHEALTHY_GRACE = 2.0  # seconds that running requests get of a replica that cannot serve any more
UNHEALTHY_EXIT = 5.0  # seconds in which such a replica ends, whatever hangs in it
NAMESPACE = "tokenweir"
logger = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

# Ray reads these when it is imported, so `import ray` stands inside the functions below.
_LOCAL_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills replicas when other programs use memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints nothing; what matters is logged here
    "RAY_kill_worker_timeout_milliseconds": "500",  # then SIGKILL, which a stopped process needs
    "RAY_worker_niceness": "0",  # else workers give way to every other program
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: every server of Ray on 127.0.0.1
    "RAY_AUTH_MODE": "token",
}


class WorkerReplica:
    """A Ray Serve replica: engines, the worker that serves them, and its place in the registry."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ServeConfig, registry: Any
    ) -> None:
        host = _bind_serve_to_node()
        engines = await asyncio.to_thread(_load_engines, config)
        self._grace = config.grace
        self._registry = registry
        self._worker = Worker(
            engines,
            dataclasses.replace(config.worker, host=host, port=0, limits=config.engine.limits),
        )
        self._info = WorkerInfo(
            address=await self._worker.start(),
            pid=os.getpid(),
            replica_id=self._worker.replica_id,
            actor=_actor_name(),
        )
        self._heartbeats = in_background("sending heartbeats", self._send_heartbeats)
        self._watching = in_background("watching the worker", self._end_when_unhealthy)

    async def check_health(self) -> None:
        """Raise if the worker cannot serve; Ray Serve then replaces the replica."""
        if not self._worker.healthy:
            raise EngineFailure(f"worker {self._info.address} or one of its engines is unhealthy")
        if self._heartbeats.done():
            raise EngineFailure(f"worker {self._info.address} no longer sends heartbeats")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray Serve how busy the worker is; LiveRequestsPolicy reads it."""
        return {"live_requests": float(self._worker.load())}

    async def __del__(self) -> None:
        """Leave: Ray Serve awaits this before it stops a replica."""
        if not hasattr(self, "_heartbeats"):
            return  # never got as far as to serve
        self._watching.cancel()
        grace = 0.0 if await self._leave() else self._grace
        await asyncio.sleep(DEREGISTERED_PAUSE)
        await self._worker.drain(grace)

    async def _leave(self) -> bool:
        """Leave the registry; return whether all is over, and nobody is to be waited for."""
        self._heartbeats.cancel()
        with _registry_may_be_away():
            return bool(await self._registry.drop.remote(self._info))
        return False

    async def _end_when_unhealthy(self) -> None:
        """End the process at once: Ray Serve would ask three times, then allow the whole grace."""
        while self._worker.healthy:
            await asyncio.sleep(HEARTBEAT)
        logger.error("%s cannot serve any more; its process ends", self._info)
        try:
            async with asyncio.timeout(UNHEALTHY_EXIT):
                await self._leave()
                await self._worker.drain(min(self._grace, UNHEALTHY_GRACE))
        finally:
            os._exit(1)

    async def _send_heartbeats(self) -> None:
        while True:
            with _registry_may_be_away():
                await self._registry.put.remote(self._info)
            await asyncio.sleep(HEARTBEAT)


class LiveRequestsPolicy:
    """Autoscaling policy of Ray Serve: so many live requests per replica.

    Ray pickles the class by value, so it uses nothing of this file.
    """

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that the load asks for, and no state."""
        load = sum((context.aggregated_metrics or {}).get("live_requests", {}).values())
        wanted = math.ceil(load / self._target)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}


class Service:
    """What `serving` has started."""

    def __init__(self, address: str, gateway: Gateway, registry: Any) -> None:
        self.address = address
        self._gateway = gateway
        self._registry = registry

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers that are alive now."""
        workers: tuple[WorkerInfo, ...] = (await self._registry.changed.remote(-1))[1]
        return workers

    @property
    def num_serving(self) -> int:
        """The number of workers that the gateway sends calls to."""
        return self._gateway.num_serving

    async def wait_for_workers(self, count: int) -> None:
        """Return once the gateway sends calls to so many workers."""
        while self.num_serving < count:
            await asyncio.sleep(0.05)


def serve_models(config: ServeConfig, announce: Callable[[Service], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; call `announce` once requests are answered.

    Raises ConfigError or PackageError before Ray is started, EngineFailure if no worker starts.
    """
    asyncio.run(_serve_until_signal(config, announce))


async def _serve_until_signal(config: ServeConfig, announce: Callable[[Service], None]) -> None:
    with cancelled_by_signals() as seen:
        try:
            async with serving(config) as service:
                announce(service)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not seen:
                raise


@contextlib.asynccontextmanager
async def serving(config: ServeConfig) -> AsyncIterator[Service]:
    """Start Ray, the workers and the gateway; at the end drain and stop them all."""
    for path in config.packages.values():
        load_package(path)
    check_port_is_free(config.host, config.port)
    async with contextlib.AsyncExitStack() as stack:
        thread = stack.enter_context(_RayThread())
        directory = stack.enter_context(_short_temporary_directory())
        stack.push_async_callback(thread.run, _stop_ray)
        await thread.run(_start_ray, config, directory)
        _reinstall_signal_handler()
        registry = await thread.run(_make_registry, config)
        workers: dict[str, WorkerInfo] = {}
        gateway = Gateway(config.gateway, partial(_kill_hung, thread, workers))
        port = await gateway.start()
        stack.push_async_callback(gateway.close)  # after the workers have had their last words
        stack.push_async_callback(thread.run, _undeploy, config, registry)
        await thread.run(_deploy, config, registry)
        follow = partial(_follow, registry, gateway, workers)
        stack.push_async_callback(_cancel, in_background("following the registry", follow))
        service = Service(address_of(config.host, port), gateway, registry)
        await _wait_until_served(config, service, thread)
        stack.push_async_callback(gateway.drain, config.grace)
        yield service


def check_port_is_free(host: str, port: int) -> None:
    """Raise ConfigError if nobody can listen there; a server that is found out later costs time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address_of(host, port)}: {error.strerror}; stop what "
                "uses the port, or choose another with --port (0: any that is free)"
            ) from error


def num_threads(config: ServeConfig) -> int:
    """Return the threads of one replica's engines: its share of the cores unless given."""
    return config.engine.num_threads or max(1, _num_cores() // config.max_replicas)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_engines(config: ServeConfig) -> Mapping[str, Engine]:
    engine_config = dataclasses.replace(config.engine, num_threads=num_threads(config))
    return {
        name: load_engine(load_package(path), engine_config)
        for name, path in config.packages.items()
    }


class _RayThread:
    """Makes Ray's blocking calls, one after the other, in a thread that lives as long as Ray.

    In the main thread ray.init would replace the handler of SIGTERM. In several threads Ray could
    be shut down while another call is in it, and its processes die with the thread that started
    them.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ray")

    async def run(self, function: Callable[[Unpack[Arguments]], T], *args: *Arguments) -> T:
        """Call the function; if cancelled, wait for its end before raising."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # seen: the cancellation says more
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


@contextlib.contextmanager
def _short_temporary_directory() -> Iterator[str]:
    """Make a directory for Ray: its default one grows for ever, and Unix sockets want it short."""
    directory = tempfile.mkdtemp(prefix="tokenweir-", dir="/tmp" if Path("/tmp").is_dir() else None)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start_ray(config: ServeConfig, directory: str) -> None:
    """Join the cluster of RAY_ADDRESS, or run a Ray of our own on the loopback interface."""
    local: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        for name, value in _LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        local = {
            "address": "local",
            "num_cpus": max(_num_cores(), config.max_replicas * num_threads(config)),
            "object_store_memory": 80 << 20,  # the smallest that Ray takes; nothing goes there
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": directory,
        }
    import ray

    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **local)


def _reinstall_signal_handler() -> None:
    """Have Python handle SIGTERM again: Ray's core has put a handler of its own before it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _make_registry(config: ServeConfig) -> Any:
    import ray

    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)(Registry)
    return actor.options(
        name=f"{config.name}-registry", get_if_exists=True, lifetime="detached"
    ).remote()


def _deploy(config: ServeConfig, registry: Any) -> None:
    """Tell Ray Serve what to run; return before it runs."""
    from ray import serve

    deployment = serve.deployment(
        WorkerReplica,
        name="Worker",
        health_check_period_s=1,
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=config.grace + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": num_threads(config)},
        **_scaling(config),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [serve.RunTarget(deployment.bind(config, registry), name=config.name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _scaling(config: ServeConfig) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    if config.min_replicas == config.max_replicas:
        return {"num_replicas": config.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            upscale_delay_s=1,
            downscale_delay_s=config.downscale_delay,
            metrics_interval_s=0.5,
            look_back_period_s=2,
            policy=AutoscalingPolicy(
                policy_function=LiveRequestsPolicy,
                policy_kwargs={"target": config.target_live_requests},
            ),
        )
    }


def _undeploy(config: ServeConfig, registry: Any) -> None:
    """Take everything away that `_deploy` and `_make_registry` have made; replicas drain."""
    import ray
    from ray import serve

    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        ray.get(registry.end.remote(), timeout=5)
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(config.name)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(registry)


async def _wait_until_served(config: ServeConfig, service: Service, thread: _RayThread) -> None:
    while service.num_serving < config.min_replicas:
        problem = await thread.run(_deployment_problem, config.name)
        if problem:
            raise EngineFailure(f"the workers do not start: {problem}")
        await asyncio.sleep(0.1)


def _deployment_problem(name: str) -> str | None:
    """Return why Ray Serve has given up; None if it has not."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None or application.status != "DEPLOY_FAILED":
        return None
    messages = [d.message for d in application.deployments.values()] or [application.message]
    lines = [line.strip() for line in messages[0].splitlines() if line.strip()]
    # The end of a traceback: `module.Class: message`.
    return re.sub(r"^[\w.]+: ", "", lines[-1]) if lines else "Ray Serve gives no reason"


async def _follow(registry: Any, gateway: Gateway, seen: dict[str, WorkerInfo]) -> None:
    """Keep the gateway's workers equal to the registry's; note all by address in `seen`."""
    version = -1
    known: set[WorkerInfo] = set()
    while True:
        with _registry_may_be_away():
            version, workers = await registry.changed.remote(version)
            seen.update((worker.address, worker) for worker in workers)
            await gateway.sync([worker.address for worker in workers])
            for worker in set(workers) - known:
                logger.info("joined: %s", worker)
            for worker in known - set(workers):
                logger.info("left: %s", worker)
            known = set(workers)
            continue
        await asyncio.sleep(0.2)


async def _kill_hung(thread: _RayThread, seen: dict[str, WorkerInfo], address: str) -> None:
    """Have Ray kill a worker that hangs: it does not stop when it is asked to."""
    worker = seen.pop(address)
    logger.info("killed: %s", worker)
    await thread.run(_kill_actor, worker.actor)


def _kill_actor(name: str) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
        ray.kill(ray.get_actor(name, namespace="serve"))


def _actor_name() -> str:
    import ray

    return str(ray.get_runtime_context().get_actor_name())


@contextlib.contextmanager
def _registry_may_be_away() -> Iterator[None]:
    """Ignore that the registry restarts: entries outlive TIME_TO_LIVE seconds of silence."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        yield


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _bind_serve_to_node() -> str:
    """Keep Serve's own gRPC server of this replica off other interfaces; return the node's IP.

    It unpickles what it is sent, and Ray binds it to every interface. Nothing of ours uses it.
    """
    import ray
    from ray.serve._private import replica

    host = str(ray.util.get_node_ip_address())
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _address: add_port(server, f"{host}:0")
    return host
