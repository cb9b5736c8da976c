"""`tokenweir` in processes of its own, as a person types it, and a server that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenweir import Client

from loadtest.chaos.server import free_port

_COMMAND = [sys.executable, "-c", "from server.cli import main; main()"]


def typed(folder: Path, *arguments: str) -> str:
    """Run a command in a folder, and return what it prints; it has to succeed."""
    ended = subprocess.run(
        [*_COMMAND, *arguments], cwd=folder, env=_environment(), capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


@contextmanager
def served(folder: Path, package: str) -> Iterator[Client]:
    """Serve a package, and end that with Ctrl-C."""
    log, port = folder / "serve.log", free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*_COMMAND, "serve", package, "--port", str(port)],
            cwd=folder,
            env=_environment(),
            stdout=file,
            stderr=file,
        )
    try:
        ends = time.monotonic() + 240
        while b"Ctrl-C stops" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        with Client(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
