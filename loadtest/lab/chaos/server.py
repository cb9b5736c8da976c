"""A server in processes of its own, which can be found, harmed and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from loadtest.errors import LoadTestError
from loadtest.lab.process_tree import read_tree
from loadtest.lab.serve import SERVE, free_port

_START_TIMEOUT = 180.0  # seconds
_LOOK_PERIOD = 0.1  # seconds
_STEADY = 0.5  # seconds
WORKER, CONTROLLER = "ray::ServeReplica", "ray::ServeController"  # processes, by name


class Server:
    """`tokenweir serve` and all below it."""

    def __init__(self, package: Path, replicas: int, log: Path) -> None:
        """Write what it says to `log`."""
        self.replicas = replicas
        self._log = log
        port, self._page = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        ports = {"--port": port, "--metrics-port": self._page}
        options = {"--replicas": replicas, "--threads": 1, **ports}
        words = (str(word) for option in options.items() for word in option)
        self._command = [*SERVE, str(package), *words]

    def start(self) -> None:
        """Start it; LoadTestError if it does not serve in time."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """The command itself, the gateway."""
        return self.process.pid

    def wait_until_whole(self, without: int | None = None, num_serving: int | None = None) -> float:
        """Return since when all workers serve, or so many, and this process is there no more.

        That is so when it is said for a while: at first the server does not know of a harm.
        """
        since = now = time.monotonic()
        deadline = now + _START_TIMEOUT
        while now < since + _STEADY:
            if now > deadline:
                raise LoadTestError(f"too few workers serve; see {self._log}")
            time.sleep(_LOOK_PERIOD)
            now = time.monotonic()
            if not self._is_whole(without, num_serving or self.replicas):
                since = now
        return since

    def find(self, what: str) -> list[int]:
        """Return the processes of this name."""
        return [pid for pid, use in read_tree(self.process.pid).items() if what in use.name]

    def wait_for(self, what: str, other_than: int | None = None) -> list[int]:
        """Return the processes of this name once there is one: Ray may be starting it again."""
        deadline = time.monotonic() + _START_TIMEOUT
        while not (found := [pid for pid in self.find(what) if pid != other_than]):
            if time.monotonic() > deadline:
                raise LoadTestError(f"no process is called {what}; see {self._log}")
            time.sleep(_LOOK_PERIOD)
        return found

    def kill(self) -> None:
        """Kill the command itself, the gateway."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it as an operator does; a worker that stands still does not end with it."""
        workers = self.find(WORKER)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def num_said(self, what: str) -> int:
        """Return how often it has said something."""
        return len(re.findall(what, self._log.read_text(errors="replace")))

    def _is_whole(self, without: int | None, num_serving: int) -> bool:
        if self.process.poll() is not None:
            raise LoadTestError(f"the server has ended by itself; see {self._log}")
        if without is not None and os.path.exists(f"/proc/{without}"):
            return False
        return self.num_serving() >= num_serving

    def num_serving(self) -> int:
        """Return how many workers take calls; 0 if nobody says."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/metrics", timeout=5
            ) as page:
                found = re.search(rb"^tokenweir_workers_serving (\d+)", page.read(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0
