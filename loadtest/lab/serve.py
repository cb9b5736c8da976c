"""A server for a study: the command as operators run it, on ports that are free."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

_START_TIMEOUT = 180.0  # seconds


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    pid: int
    address: str
    page: str | None  # URL of its metrics
    admin: str | None = None  # address of its admin port


@contextlib.contextmanager
def served(
    package: Path, settings: str, replicas: int = 1, threads: int = 1, cores: str | None = None
) -> Iterator[Served]:
    """Serve a package with settings in TOML until the end of the block; `cores` as of taskset."""
    kept_to = [] if cores is None else ["taskset", "-c", cores]
    command = [
        *kept_to,
        sys.executable,
        "-c",
        "from server.cli import main; main()",
        "serve",
        str(package),
    ]
    with (
        tempfile.NamedTemporaryFile("w", suffix=".toml") as file,
        tempfile.NamedTemporaryFile() as log,
    ):
        file.write(settings)
        file.flush()
        options = ["--config", file.name, "--port", "0", "--threads", str(threads)]
        number = ["--replicas", str(replicas)]
        process = subprocess.Popen([*command, *options, *number], stdout=log, stderr=log)
        try:
            said = _wait(process, Path(log.name))
            page = re.search(r"metrics on (http://\S+)", said)
            (address,) = re.findall(r"^serving .* on (\S+);", said, re.MULTILINE)
            admin = re.search(r"operated on (\S+)", said)
            yield Served(
                process.pid, address, page[1] if page else None, admin[1] if admin else None
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT
    while "\nserving " not in f"\n{(said := log.read_text())}":
        if process.poll() is not None or time.monotonic() > deadline:
            raise click.ClickException(f"the server does not start: {said}")
        time.sleep(0.2)
    return said
