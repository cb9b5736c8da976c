"""Ray itself: one of our own on this machine, or a cluster that is joined."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from engine.errors import ConfigError
from engine.machine import num_cores, quota_notice
from server.ray import end_with_parent
from server.ray.address import connect_once, joins_cluster, not_joined
from server.ray.beside import beside
from server.ray.claim import NAMESPACE, claim_name
from server.ray.internals import private_names
from server.ray.resources import check_gpus_of_cluster, num_threads
from server.ray.run_directory import RunDirectory, remove_what_dead_owners_left, run_directory
from server.ray.thread import RayThread, watch
from server.settings import Settings

logger = logging.getLogger(__name__)

# Ray reads these when it is imported, so `import ray` stands inside the functions below.
_LOCAL_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills replicas when other programs use memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints nothing; what matters is logged here
    "RAY_kill_worker_timeout_milliseconds": "500",  # then SIGKILL, which a stopped process needs
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # else agents look every 0.4 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # else its clients die amid the drain
    # Models come and go: what is kept of the processes that had them.
    "RAY_maximum_gcs_destroyed_actor_cached_count": "16",
    "RAY_maximum_gcs_dead_worker_cached_count": "16",
    "RAY_JEMALLOC_PROFILE": "gcs_server,raylet",  # they give back what they have freed
    "RAY_JEMALLOC_CONF": "narenas:1,dirty_decay_ms:1000,muzzy_decay_ms:0",
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

_DASHBOARD_AGENT, _RUNTIME_ENV_AGENT = "--dashboard_agent_command", "--runtime_env_agent_command"


@contextlib.asynccontextmanager
async def running_ray(config: Settings) -> AsyncIterator[RayThread]:
    """Start Ray, or join a cluster; notice its loss; leave nothing behind."""
    remove_what_dead_owners_left()
    with RayThread() as ray, run_directory() as directory:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(ray.finish, _stop_ray)
            await ray.run(_start_ray, config, directory)
            await ray.run(check_gpus_of_cluster, config)
            _reinstall_signal_handler()
            claim = await ray.run(claim_name, config.listen.name) if joins_cluster() else None
            stack.callback(lambda: claim)  # held until then
            watching = partial(watch, await ray.run(_servers), ray.lose)
            await stack.enter_async_context(beside("watching Ray", watching))
            yield ray


def node_address() -> str:
    """Return the IP address of this host in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def _start_ray(config: Settings, directory: RunDirectory) -> None:
    """Join the cluster of RAY_ADDRESS, or run a Ray of our own on the loopback interface."""
    # Under `uv run` Ray would pack the current folder, models and all, and upload it for workers.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    local: dict[str, Any] = {}
    if not joins_cluster():
        if notice := quota_notice():
            logger.info("%s", notice)
        for name, value in _LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        local = {
            "address": "local",
            "num_cpus": max(num_cores(), config.engine.max_replicas * num_threads(config)),
            "object_store_memory": 80 << 20,  # the smallest that Ray takes; nothing goes there
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(directory.for_ray),
        }
    import ray

    with directory.marked_environment(), _adapted_processes():
        try:
            if not local:
                connect_once(os.environ["RAY_ADDRESS"])
            ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **local)
        except OSError as error:
            if local:
                raise
            raise ConfigError(not_joined(os.environ["RAY_ADDRESS"], error)) from error


@contextlib.contextmanager
def _adapted_processes() -> Iterator[None]:
    """Have ray.init start no process that nobody asks here, and none that stays when all is killed.

    Not started are the autoscaler of nodes, the log monitor, the dashboard and its agent. The
    raylet's other agent, which has to start workers, ends with it: by itself it stays forever. A
    signal to the process group of the command does not reach Ray, which the drain needs. Nothing is
    started if a cluster is joined.
    """
    with private_names():
        from ray._private import parameter, services

        before = parameter.RayParams, services.start_api_server, services.start_ray_process
        popen = services.ConsolePopen
    make_parameters, _, start = before

    def start_adapted(command: list[str], *args: Any, **options: Any) -> Any:
        return start(_adapted_command(command), *args, **options)

    parameter.RayParams = partial(make_parameters, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *_, **__: ("", None)
    services.start_ray_process = start_adapted
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        parameter.RayParams, services.start_api_server, services.start_ray_process = before


def _adapted_command(command: list[str]) -> list[str]:
    """Return the command of a process of Ray; the raylet's, as `_adapted_processes` says."""
    if os.path.basename(command[0]) != "raylet":
        return command
    options = dict(word.split("=", 1) for word in command if "=" in word)
    launcher = subprocess.list2cmdline([sys.executable, "-I", end_with_parent.__file__])
    with private_names():
        _tell_of_no_dashboard_agent(options["--session_dir"], options["--node_id"])
        dashboard, runtime_env = (options[name] for name in (_DASHBOARD_AGENT, _RUNTIME_ENV_AGENT))
    adapted = {
        f"{_DASHBOARD_AGENT}={dashboard}": f"{_DASHBOARD_AGENT}= ",
        f"{_RUNTIME_ENV_AGENT}={runtime_env}": f"{_RUNTIME_ENV_AGENT}={launcher} {runtime_env}",
    }
    return [adapted.get(word, word) for word in command]


def _tell_of_no_dashboard_agent(session_dir: str, node_id: str) -> None:
    """Write that nobody listens at its ports, as it does without Ray's extras: the raylet waits."""
    from ray import _raylet

    ray: Any = _raylet  # it is not described in full
    for name in (
        ray.METRICS_AGENT_PORT_NAME,
        ray.METRICS_EXPORT_PORT_NAME,
        ray.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    ):
        ray.persist_port(session_dir, node_id, name, -1)


def _reinstall_signal_handler() -> None:
    """Have Python handle SIGTERM again: Ray's core has put a handler of its own before it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


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
