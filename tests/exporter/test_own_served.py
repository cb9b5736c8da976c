"""A package of a person's own class needs nothing of theirs where it is served."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenweir import Client

from exporter.examples import own_class


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_package_of_the_example_is_served(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own_class.main(str(tmp_path / "counter"))
    log, port = tmp_path / "serve.log", free_port()
    tree = os.pathsep.join(entry for entry in sys.path if entry)
    command = "from server.cli import main; main()"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", command, "serve", "counter", "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": tree},
            stdout=file,
            stderr=file,
        )
    try:
        ends = time.monotonic() + 240
        while b"Ctrl-C stops" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate("counter", "7 8", max_new_tokens=4).text == "9 0 1 2"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
