"""A server for a study: the command as operators run it, on ports that are free."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import LoadTestError

ROOT = Path(__file__).parents[2]
TOKENWEIR = (sys.executable, "-c", "from server.cli import main; main()")
SERVE = (*TOKENWEIR, "serve")
_START_TIMEOUT = 180.0  # seconds


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    pid: int
    address: str
    admin: str | None = None  # address of its admin port


def environment(tree: Path) -> dict[str, str]:
    """Return that of a process which has the code of a checkout."""
    path = tree.resolve()
    places = (path, path / "proto" / "python", path / "proto" / "gen")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}


@contextlib.contextmanager
def served(
    package: Path,
    replicas: int = 1,
    threads: int = 1,
    options: Sequence[str] = (),
    tree: Path = ROOT,
) -> Iterator[Served]:
    """Serve a package until the end of the block."""
    counts = {"--port": 0, "--threads": threads, "--replicas": replicas}
    words = (str(word) for option in counts.items() for word in option)
    command = [*SERVE, str(package), *words, *options]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(tree), cwd=tree)
        try:
            said = _wait(process, Path(log.name))
            (address,) = re.findall(r"^serving .* on (\S+);", said, re.MULTILINE)
            admin = re.search(r"operated on (\S+)", said)
            yield Served(process.pid, address, admin[1] if admin else None)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT
    while "\nserving " not in f"\n{(said := log.read_text())}":
        if process.poll() is not None or time.monotonic() > deadline:
            raise LoadTestError(f"the server does not start: {said}")
        time.sleep(0.2)
    return said


def tokenweir(*arguments: object) -> tuple[int, str]:
    """Run a command, print what it prints as it comes; return its exit code and last line."""
    process = subprocess.Popen(
        [*TOKENWEIR, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    last = f"tokenweir {arguments[0]} said nothing"
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    return process.wait(), last
