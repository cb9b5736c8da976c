"""A Ray of our own on this machine, which its own command starts; it ends with this process."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

from engine.errors import EngineFailure
from engine.machine import num_cores, quota_notice
from server.ray.processes import keeper
from server.ray.resources import num_threads
from server.settings import Settings

logger = logging.getLogger(__name__)

# Ray reads these when it is imported, here and in its own processes.
_SETTINGS = {
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

_COMMAND = "from server.ray.internals import run_ray_command; run_ray_command()"
_OPTIONS = (
    "--head",
    "--port=0",
    "--node-ip-address=127.0.0.1",
    "--object-store-memory=83886080",  # the least that Ray takes; nothing goes there
    "--include-dashboard=false",
    "--no-monitor",  # nodes do not come and go
    "--include-log-monitor=false",
    "--min-worker-port=0",  # any
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
)
_END_TIMEOUT = 5.0  # seconds for killed processes to end


class LocalRay:
    """The processes of a Ray; none of them stays when this one ends, however it ends.

    They have a session of their own: a signal to the process group of the command does not reach
    them, which the drain needs.
    """

    def __init__(self, directory: Path) -> None:
        """Give Ray a directory for itself."""
        self._directory = directory
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self, config: Settings) -> None:
        """Begin to start them, and prepare the environment of this process for them."""
        if notice := quota_notice():
            logger.info("%s", notice)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        cores = max(num_cores(), config.engine.max_replicas * num_threads(config))
        self._keeper = subprocess.Popen(
            [
                *(sys.executable, "-I", keeper.__file__, sys.executable, "-c", _COMMAND, "start"),
                *(*_OPTIONS, f"--num-cpus={cores}", f"--temp-dir={self._directory}"),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def address(self) -> str:
        """Return the address once they run; EngineFailure with Ray's words if they do not."""
        assert self._keeper is not None and self._keeper.stdout is not None, "it was started"
        said = self._keeper.stdout.read().decode(errors="replace")  # all, until the command ends
        try:
            return (self._directory / "ray_current_cluster").read_text().strip()
        except OSError as error:
            raise EngineFailure(f"Ray does not start: {_last_line(said)}") from error

    def end(self) -> None:
        """Kill them all, those that workers have started among them."""
        if self._keeper is not None:
            self._keeper.communicate(timeout=_END_TIMEOUT)  # it ends with its standard input


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
