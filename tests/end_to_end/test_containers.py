"""Containers of every kind allowed: `tokenweir serve` serves there, and ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tokenweir import Client

from loadtest.lab.serve import free_port
from tests.fakes.served import served, tiny_package

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(240)]

NO_PROXY_IS_THERE = dict.fromkeys(
    ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"),
    "http://127.0.0.1:9",
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_package(tmp_path_factory.mktemp("model"))


def answers(client: Client) -> bool:
    return bool(client.generate("package", "w1", max_new_tokens=2).text)


def in_own_mounts(prepared: str) -> list[str]:
    """Return what runs a command where mounts are its own; skip the test where nobody may."""
    front = ["unshare", "--mount", "sh", "-c", f'{prepared} && exec "$@"', "sh"]
    _skip_unless_it_runs(*front, "true")
    return front


def _skip_unless_it_runs(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"{command[0]} may not be used here: {done.stderr.strip()}")


def test_root_is_read_only_beside_a_temporary_directory(package: Path) -> None:
    # The package is seen at /mnt, beside the new /tmp.
    front = in_own_mounts(
        "mount --bind . /mnt && cd /mnt && mount -o remount,bind,ro / && mount -t tmpfs tmp /tmp"
    )

    with served(package.parent, "package", front=front) as client:
        assert answers(client)


def test_shared_memory_is_small(package: Path) -> None:
    front = in_own_mounts("mount -t tmpfs -o size=8m shm /dev/shm")

    with served(package.parent, "package", front=front) as client:
        assert answers(client)


def test_user_has_no_entry_and_no_home(package: Path) -> None:
    front = ["setpriv", "--reuid=12345", "--regid=0", "--clear-groups", "env", "--unset=HOME"]
    _skip_unless_it_runs(*front, sys.executable, "-c", "")

    with tempfile.TemporaryDirectory() as folder:  # that of pytest is for one user alone
        shutil.copytree(package, Path(folder) / "package")
        Path(folder).chmod(0o755)

        with served(Path(folder), "package", front=front) as client:
            assert answers(client)


def test_a_name_is_of_ipv6_alone(package: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("::1 only6\n127.0.0.1 localhost\n")
    front = in_own_mounts(f"mount --bind {tmp_path / 'hosts'} /etc/hosts")

    with served(package.parent, "package", "--host", "only6", front=front, host="[::1]") as one:
        assert answers(one)


def test_a_proxy_that_nobody_needs_here_is_named(package: Path) -> None:
    with served(package.parent, "package", environment=NO_PROXY_IS_THERE) as client:
        assert answers(client)


def test_clients_that_say_nothing_have_as_many_connections_as_there_may_be_files(
    package: Path,
) -> None:
    front = ["sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh"]

    port = free_port()

    with served(package.parent, "package", front=front, port=port) as client, ExitStack() as stack:
        assert answers(client)
        for _ in range(1100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        assert answers(client)
        stack.close()
        assert answers(client)


def test_no_zombies_stay_where_the_command_is_the_first_process(package: Path) -> None:
    front = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    _skip_unless_it_runs(*front, "true")
    port = free_port()

    with served(package.parent, "package", front=front, port=port) as client:
        # `unshare` runs the command as its child, with the same words.
        first = max(pid for pid, what in _processes() if f"--port {port}" in what)
        ours = os.readlink(f"/proc/{first}/ns/pid")
        for _ in range(3):
            killed = _workers(ours)
            os.kill(killed[0], signal.SIGKILL)
            while _workers(ours) in ([], killed):
                time.sleep(0.05)
            assert answers(client)

        assert [what for pid, what in _processes(ours) if _is_zombie(pid)] == []
        os.kill(first, signal.SIGINT)  # `unshare` keeps signals to itself


def _workers(namespace: str) -> list[int]:
    return [pid for pid, what in _processes(namespace) if what.startswith("ray::ServeReplica")]


def _processes(namespace: str = "") -> list[tuple[int, str]]:
    """Return the number and the command of each process, of a container or of all."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if namespace in os.readlink(folder / "ns" / "pid"):
                what = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(folder.name), what))
    return found


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return False
