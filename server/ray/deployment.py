"""Runs workers as Ray Serve replicas behind a gateway: the only file that knows Ray.

    command's process                                       Ray
    serving() ── Roster, Registry ◄── heartbeat, log ── WorkerReplica, one a process
                   └── Gateway ─────────── gRPC ─────────► Worker, its engines

Ray Serve places, health-checks, restarts and scales the replicas. Requests never pass through
Ray: every replica opens its own gRPC server and tells the roster where; the gateway follows it.
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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvloop

from engine.background import in_background
from engine.device.distributions import check_cuda_distribution, check_distributions
from engine.errors import ConfigError, EngineFailure, TokenweirError
from engine.factory import device_of, load_engine
from engine.package.package import load_package
from server.config import ServeConfig
from server.gateway.gateway import Gateway
from server.listening import address_of
from server.ray import end_with_parent
from server.ray.registry import HEARTBEAT, Registry, WorkerInfo
from server.ray.roster import Roster, RosterAddress
from server.ray.roster_link import LinkHandler, RosterLink
from server.ray.run_directory import RunDirectory, remove_what_dead_owners_left, run_directory
from server.ray.thread import RayThread, watch
from server.signals import cancelled_by_signals
from server.worker.engines import Engine
from server.worker.worker import Worker

DEREGISTERED_PAUSE = 0.3  # seconds for gateways to see that a replica goes, before it refuses
UNHEALTHY_GRACE = 2.0  # seconds that running requests get of a replica that cannot serve any more
UNHEALTHY_EXIT = 5.0  # seconds in which such a replica ends, whatever hangs in it
SHORTAGE_AFTER, SHORTAGE_PERIOD = 7.0, 60.0  # seconds: it is told first, and again
CLAIM_PATIENCE = 5.0  # seconds
ABANDONED_AFTER = 5.0  # seconds without the command, until a replica looks if it is gone
NAMESPACE = "tokenweir"
logger = logging.getLogger(__name__)

# Ray reads these when it is imported, so `import ray` stands inside the functions below.
_LOCAL_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills replicas when other programs use memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints nothing; what matters is logged here
    "RAY_kill_worker_timeout_milliseconds": "500",  # then SIGKILL, which a stopped process needs
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # else agents look every 0.4 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # else who loses it dies amid the drain
    # Nobody reads what Ray reports of itself, and nothing here waits for its rounds.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Workers give way to the gateway: calls that it has not read expire. 15 would be Ray's choice.
    "RAY_worker_niceness": "5",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: every server of Ray on 127.0.0.1
    "RAY_AUTH_MODE": "token",
}


class WorkerReplica:
    """A Ray Serve replica: engines, the worker that serves them, and its place in the registry."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ServeConfig, roster: RosterAddress
    ) -> None:
        self._link = RosterLink(roster)
        _forward_log(self._link)
        look = partial(self._end_without_command, config.name)
        self._looking = in_background("looking for the command", look)
        try:
            self._info = await self._start(config)
        except Exception as error:
            is_expected = isinstance(error, TokenweirError)
            logger.error("it cannot start: %s", error, exc_info=not is_expected)
            await self._link.close()
            raise
        self._link.alive(self._info)
        self._watching = in_background("watching the worker", self._end_when_unhealthy)

    async def _start(self, config: ServeConfig) -> WorkerInfo:
        host = _bind_serve_to_node()
        engines = await asyncio.to_thread(_load_engines, config)
        self._grace = config.grace
        self._worker = Worker(
            engines,
            dataclasses.replace(config.worker, host=host, port=0, limits=config.engine.limits),
        )
        return WorkerInfo(
            address=await self._worker.start(),
            pid=os.getpid(),
            replica_id=self._worker.replica_id,
            actor=_actor_name(),
        )

    async def check_health(self) -> None:
        """Raise if the worker cannot serve; Ray Serve then replaces the replica."""
        if not self._worker.healthy:
            raise EngineFailure(f"worker {self._info.address} or one of its engines is unhealthy")
        if self._link.broken:
            raise EngineFailure(f"worker {self._info.address} no longer sends heartbeats")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray Serve how busy the worker is; LiveRequestsPolicy reads it."""
        return {"live_requests": float(self._worker.load())}

    async def __del__(self) -> None:
        """Leave: Ray Serve awaits this before it stops a replica."""
        if not hasattr(self, "_watching"):
            return  # never got as far as to serve
        self._watching.cancel()
        grace = 0.0 if await self._link.leave() else self._grace
        await asyncio.sleep(DEREGISTERED_PAUSE)
        await self._worker.drain(grace)
        await self._link.close()

    async def _end_without_command(self, name: str) -> None:
        """Undeploy the service once its command is gone: a cluster would run it for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            if self._link.silence > ABANDONED_AFTER:
                await asyncio.to_thread(_undeploy_if_abandoned, name)

    async def _end_when_unhealthy(self) -> None:
        """End the process at once: Ray Serve would ask three times, then allow the whole grace."""
        while self._worker.healthy:
            await asyncio.sleep(HEARTBEAT)
        logger.error("%s cannot serve any more; its process ends", self._info)
        try:
            async with asyncio.timeout(UNHEALTHY_EXIT):
                await self._link.leave()
                await self._worker.drain(min(self._grace, UNHEALTHY_GRACE))
                await self._link.close()
        finally:
            os._exit(1)


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

    def __init__(self, address: str, gateway: Gateway, registry: Registry, ray: RayThread) -> None:
        self.address = address
        self._gateway = gateway
        self._registry = registry
        self._ray = ray

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers that are alive now."""
        return self._registry.workers

    @property
    def num_serving(self) -> int:
        """The number of workers that the gateway sends calls to."""
        return self._gateway.num_serving

    async def wait_for_workers(self, count: int) -> None:
        """Return once the gateway sends calls to so many workers."""
        while self.num_serving < count:
            await asyncio.sleep(0.05)

    async def wait_until_lost(self) -> None:
        """Raise RayLost as soon as Ray is gone: without it no worker is replaced."""
        await self._ray.wait_until_lost()


def serve_models(config: ServeConfig, announce: Callable[[Service], None]) -> None:
    """Serve until a signal ends it, then drain; call `announce` once requests are answered.

    Raises ConfigError or PackageError before Ray is started, EngineFailure if no worker starts,
    RayLost if Ray is gone or hangs: what is left of it in this process keeps the interpreter.
    """
    uvloop.run(_serve_until_signal(config, announce))  # a refusal costs a fifth less


async def _serve_until_signal(config: ServeConfig, announce: Callable[[Service], None]) -> None:
    with cancelled_by_signals() as seen:
        try:
            async with serving(config) as service:
                announce(service)
                await service.wait_until_lost()
        except asyncio.CancelledError:
            if not seen:
                raise


@contextlib.asynccontextmanager
async def serving(config: ServeConfig) -> AsyncIterator[Service]:
    """Start Ray, the workers and the gateway; at the end drain and stop them all."""
    check_distributions()
    packages = [load_package(path) for path in config.packages.values()]
    devices = [device_of(package, config.engine) for package in packages]
    config = config.settled([package.manifest.target for package in packages])
    if not _joins_cluster() and "cuda" in devices:
        check_cuda_distribution()  # on a cluster workers run where others have installed it
    check_port_is_free(config.host, config.port)
    async with contextlib.AsyncExitStack() as stack:
        ray = await stack.enter_async_context(_running_ray(config))
        registry = Registry()
        roster = Roster(registry)
        roster_address = await roster.start(await ray.run(_node_address))
        stack.push_async_callback(roster.close)
        workers: dict[str, WorkerInfo] = {}
        gateway = Gateway(config.gateway_settings, partial(_kill_hung, ray, workers))
        port = await gateway.start()
        stack.push_async_callback(gateway.close)  # after the workers have had their last words
        stack.push_async_callback(ray.finish, _undeploy, config)
        stack.callback(roster.end)
        await ray.run(_deploy, config, roster_address)
        follow = partial(_follow, registry, gateway, workers)
        stack.push_async_callback(_cancel, in_background("following the registry", follow))
        service = Service(address_of(config.host, port), gateway, registry, ray)
        await _wait_until_served(config, service, ray, roster)
        stack.push_async_callback(gateway.drain, config.grace)
        yield service


@contextlib.asynccontextmanager
async def _running_ray(config: ServeConfig) -> AsyncIterator[RayThread]:
    """Start Ray, or join a cluster; notice its loss; leave nothing behind."""
    remove_what_dead_owners_left()
    with RayThread() as ray, run_directory() as directory:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(ray.finish, _stop_ray)
            await ray.run(_start_ray, config, directory)
            await ray.run(_check_gpus, config)
            _reinstall_signal_handler()
            claim = await ray.run(_claim_name, config.name) if _joins_cluster() else None
            stack.callback(lambda: claim)  # held until then
            watching = partial(watch, await ray.run(_servers), ray.lose)
            stack.push_async_callback(_cancel, in_background("watching Ray", watching))
            yield ray


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


def resources(config: ServeConfig) -> dict[str, float]:
    """Return what Ray reserves for one replica, by Ray's own names."""
    gpus = {"GPU": config.num_gpus_per_replica} if config.num_gpus_per_replica else {}
    return {"CPU": num_threads(config), **gpus}


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


def _start_ray(config: ServeConfig, directory: RunDirectory) -> None:
    """Join the cluster of RAY_ADDRESS, or run a Ray of our own on the loopback interface."""
    local: dict[str, Any] = {}
    if not _joins_cluster():
        for name, value in _LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        local = {
            "address": "local",
            "num_cpus": max(_num_cores(), config.max_replicas * num_threads(config)),
            "object_store_memory": 80 << 20,  # the smallest that Ray takes; nothing goes there
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(directory.for_ray),
        }
    import ray

    with directory.marked_environment(), _adapted_processes():
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **local)


def _check_gpus(config: ServeConfig) -> None:
    """Raise ConfigError if a Ray of our own has too few GPUs for the workers: it gets no more."""
    import ray

    if config.num_gpus_per_replica and not _joins_cluster():
        check_gpus(config, int(ray.cluster_resources().get("GPU", 0)))


def check_gpus(config: ServeConfig, num_gpus: int) -> None:
    """Raise ConfigError if the least number of replicas does not fit on so many GPUs."""
    gpus = config.num_gpus_per_replica
    if not gpus or config.min_replicas <= num_gpus * config.replicas_per_gpu:
        return
    if not num_gpus:
        raise ConfigError("Ray finds no GPU on this machine; serve with --device cpu")
    raise ConfigError(
        f"{config.min_replicas} replicas want {gpus:g} GPUs each, and this machine has {num_gpus}; "
        "ask for fewer with --replicas, or let several share one, such as two with "
        "--num-gpus-per-replica 0.5"
    )


@contextlib.contextmanager
def _adapted_processes() -> Iterator[None]:
    """Have ray.init start no process that nobody asks here, and none that stays when all is killed.

    Not started are the autoscaler of nodes, the log monitor and the dashboard. The raylet's agents
    end with it: by themselves they stay for ever. A signal to the process group of the command does
    not reach Ray, which the drain needs. Where a cluster is joined nothing is started.
    """
    from ray._private import parameter, services

    before = parameter.RayParams, services.start_api_server, services.start_ray_process
    make_parameters, _, start = before
    popen = services.ConsolePopen

    def start_adapted(command: list[str], *args: Any, **options: Any) -> Any:
        return start([_ended_with_raylet(word) for word in command], *args, **options)

    parameter.RayParams = partial(make_parameters, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *_, **__: ("", None)
    services.start_ray_process = start_adapted
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        parameter.RayParams, services.start_api_server, services.start_ray_process = before


def _ended_with_raylet(option: str) -> str:
    """Return an option of the raylet; if it is the command of an agent, one that ends with it."""
    launcher = subprocess.list2cmdline([sys.executable, "-I", end_with_parent.__file__])
    return re.sub(r"^--\w+_agent_command=", lambda found: f"{found[0]}{launcher} ", option)


def _reinstall_signal_handler() -> None:
    """Have Python handle SIGTERM again: Ray's core has put a handler of its own before it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _joins_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


class _Claim:
    """Holds the name of a service on a cluster; Ray ends it with the command that made it."""


def _claim_name(name: str) -> Any:
    """Return what holds the name as long as it is held itself.

    Raises ConfigError if another command has the name; one that was killed has it for a moment.
    """
    import ray

    deadline = time.monotonic() + CLAIM_PATIENCE
    while True:
        try:
            return ray.remote(num_cpus=0)(_Claim).options(name=name).remote()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"a service named {name!r} runs on this Ray cluster already; "
                    "choose another name with --name"
                ) from error
        time.sleep(0.5)


def _undeploy_if_abandoned(name: str) -> None:
    """Take a service away whose name nobody holds: Ray ends the claim of a command that ends.

    Called in a replica, which holds the name meanwhile: what a new command of that name deploys
    stays.
    """
    import ray
    from ray import serve

    try:
        claim = ray.remote(num_cpus=0)(_Claim).options(name=name, namespace=NAMESPACE).remote()
    except ValueError:  # its command lives, or another has the name
        return
    logger.error("the command that serves %s is gone; its workers end", name)
    serve.delete(name, _blocking=False)
    del claim


def _node_address() -> str:
    """Return the IP address of this host in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


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


def _deploy(config: ServeConfig, roster: RosterAddress) -> None:
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
        ray_actor_options=_actor_options(config),
        **_scaling(config),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [serve.RunTarget(deployment.bind(config, roster), name=config.name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _actor_options(config: ServeConfig) -> dict[str, float]:
    names = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return {names[resource]: amount for resource, amount in resources(config).items()}


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


def _undeploy(config: ServeConfig) -> None:
    """Take everything away that `_deploy` has made; replicas drain."""
    import ray
    from ray import serve

    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(config.name)


async def _wait_until_served(
    config: ServeConfig, service: Service, ray: RayThread, roster: Roster
) -> None:
    started, told = time.monotonic(), 0
    while service.num_serving < config.min_replicas:
        problem = await ray.run(_deployment_problem, config.name)
        if problem:
            raise EngineFailure(f"the workers do not start: {problem}")
        if time.monotonic() - started > SHORTAGE_AFTER + told * SHORTAGE_PERIOD:
            told += 1
            missing = config.min_replicas - roster.num_workers
            if problem := await ray.run(_shortage, missing, config):
                logger.warning(problem)
        await asyncio.sleep(0.2)


def _shortage(num_workers: int, config: ServeConfig) -> str | None:
    """Return what Ray lacks for so many workers that have no process; None if nothing.

    A Ray of our own has as many cores as it is asked for.
    """
    import ray

    wanted = resources(config)
    if not _joins_cluster():
        del wanted["CPU"]
    return shortage(num_workers, wanted, ray.available_resources(), ray.cluster_resources())


def shortage(
    num_workers: int,
    wanted: Mapping[str, float],
    free: Mapping[str, float],
    total: Mapping[str, float],
) -> str | None:
    """Return what is missing for so many workers that want so much each; None if nothing is."""
    words = {"CPU": ("cores", "--threads"), "GPU": ("GPUs", "--num-gpus-per-replica")}
    for resource, amount in wanted.items():
        if free.get(resource, 0) >= num_workers * amount:
            continue
        what, option = words[resource]
        return (
            f"waiting for {what}: {num_workers} more workers want {amount:g} each, and of the "
            f"{total.get(resource, 0):g} of the Ray cluster {free.get(resource, 0):g} are free; "
            f"ask for fewer with --replicas or {option}, or let the cluster grow"
        )
    return None


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


async def _follow(registry: Registry, gateway: Gateway, seen: dict[str, WorkerInfo]) -> None:
    """Keep the gateway's workers equal to the registry's; note all by address in `seen`."""
    known: tuple[WorkerInfo, ...] = ()
    while True:
        workers = await registry.changed(known)
        seen.update((worker.address, worker) for worker in workers)
        await gateway.sync([worker.address for worker in workers])
        for worker in set(workers) - set(known):
            logger.info("joined: %s", worker)
        for worker in set(known) - set(workers):
            logger.info("left: %s", worker)
        known = workers


async def _kill_hung(ray: RayThread, seen: dict[str, WorkerInfo], address: str) -> None:
    """Have Ray kill a worker that hangs: it does not stop when it is asked to."""
    worker = seen.pop(address)
    logger.info("killed: %s", worker)
    await ray.run(_kill_actor, worker.actor)


def _kill_actor(name: str) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
        ray.kill(ray.get_actor(name, namespace="serve"))


def _actor_name() -> str:
    import ray

    return str(ray.get_runtime_context().get_actor_name())


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _forward_log(link: RosterLink) -> None:
    """Tell the command the log of this process: nobody reads the files of a worker."""
    logging.getLogger().addHandler(LinkHandler(link))
    for package in ("server", "engine"):
        logging.getLogger(package).setLevel(logging.INFO)


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
