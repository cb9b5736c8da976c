"""A process before it serves: gRPC without threads, and garbage that is looked at once."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.process import keep_what_is_there
from tests.engine.package.test_package import write_package

_ASKED = "-event_engine_listener,-event_engine_client"
# Runs a command, and tells what gRPC finds in the environment when it is imported.
_COMMAND = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc._cython.cygrpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))
sys.meta_path.insert(0, Watch())
import {first}
from server.cli.app import run
code = run(sys.argv[1:])
print(os.environ.get("GRPC_EXPERIMENTS"), sys.getswitchinterval(), code)
"""


def test_the_collector_passes_over_what_was_there_and_sees_what_is_new() -> None:
    old = [object]

    keep_what_is_there()

    new = [object]
    seen = {id(each) for each in gc.get_objects()}
    assert id(new) in seen and id(old) not in seen


@pytest.mark.parametrize(
    ("command", "mine"),
    [("serve", "event_engine_fork"), ("verified", None), ("gateway", None)],
)
def test_before_a_command_relays_calls_grpc_is_imported_without_threads_of_its_own(
    command: str, mine: str | None, tmp_path: Path
) -> None:
    done = _run(command, "os", mine, tmp_path)

    asked = f"{mine},{_ASKED}" if mine else _ASKED
    assert done.stdout.split() == [asked, str(mine), "0.0005", "3"]
    assert "Address already in use" in done.stderr
    assert "xperiment" not in done.stderr  # gRPC says there what it does not know


@pytest.mark.parametrize(
    ("mine", "advice"),
    [
        (None, _ASKED),
        ("event_engine_fork", f"event_engine_fork,{_ASKED}"),
        ("-event_engine_client,-event_engine_listener", None),  # whatever their order
    ],
)
def test_grpc_with_threads_of_its_own_is_refused_with_the_way_out(
    mine: str | None, advice: str | None, tmp_path: Path
) -> None:
    done = _run("serve", "grpc", mine, tmp_path)

    message = r"gRPC was imported before GRPC_EXPERIMENTS could be set.*with GRPC_EXPERIMENTS=(.*)$"
    found = re.search(message, done.stderr)
    assert (found and found[1]) == advice


def _run(
    command: str, first: str, experiments: str | None, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command at a port that is taken, behind an import."""
    environment = {name: value for name, value in os.environ.items() if "GRPC" not in name}
    environment |= {"GRPC_EXPERIMENTS": experiments} if experiments else {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        package = str(write_package(folder / "package"))
        (checkpoint := folder / "checkpoint").mkdir()
        (checkpoint / "config.json").write_text('{"model": {}}')
        words = {
            "serve": ["serve", package],
            "verified": ["serve", package, "--verify", str(checkpoint)],
            "gateway": ["gateway", "--ray-address", "127.0.0.1:1"],
        }[command]
        port = str(taken.getsockname()[1])
        return subprocess.run(
            [sys.executable, "-c", _COMMAND.format(first=first), *words, "--port", port],
            env=environment,
            capture_output=True,
            text=True,
        )
