"""The end of `tokenweir serve` when a part of it is killed: it ends, and nothing stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenweir import Client, TokenweirClientError, Unavailable

from tests.fakes.served import tiny_package

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(240)]

GRACE = 3
MARK = "TOKENWEIR_TEST_SERVER"  # in the environment of all that a server starts: its log
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}  # for the cluster that several services join
_CLUSTER = """
import sys, tempfile, ray
with tempfile.TemporaryDirectory(dir="/tmp") as directory:
    context = ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False,
                       _temp_dir=directory, _node_ip_address="127.0.0.1")
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


@dataclass
class Server:
    """A running `tokenweir serve`."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until(self, what: str, seconds: float = 90) -> re.Match[str]:
        """Return where a line of the log matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(what, self.log.read_text(), re.MULTILINE):
                return found
            time.sleep(0.1)
        raise AssertionError(f"no {what!r}:\n{self.log.read_text()}")

    def parts(self) -> dict[int, str]:
        """Return the processes that it has started: their command lines by process id."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                if f"{MARK}={self.log}".encode() in environment and int(process.name) != self.pid:
                    command = (process / "cmdline").read_bytes()
                    found[int(process.name)] = command.decode(errors="replace")
            except OSError:  # it has just ended
                continue
        return found

    def wait_until_nothing_is_left(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while parts := self.parts():
            assert time.monotonic() < deadline, parts
            time.sleep(0.1)

    def ports(self) -> dict[str, set[str]]:
        """Return the hosts that its processes listen on, as the kernel writes them, by process."""
        rows = [row.split() for table in ("tcp", "tcp6") for row in _rows(f"/proc/net/{table}")]
        hosts = {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
        found: dict[str, set[str]] = {}
        for pid, command in self.parts().items():
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it has just been closed
                    if host := hosts.get(str(descriptor.readlink())):
                        found.setdefault(command.replace("\0", " "), set()).add(host)
        return found

    def kill_part(self, program: str) -> None:
        (pid,) = [pid for pid, command in self.parts().items() if f"/{program}\0" in command]
        os.kill(pid, signal.SIGKILL)


def _rows(table: str) -> list[str]:
    return Path(table).read_text().splitlines()[1:]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_package(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(package: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server and return it at once; it is killed after the test."""
    servers: list[Server] = []

    def start_server(*options: str, **environment: str) -> Server:
        log = tmp_path / f"log{len(servers)}"
        command = [sys.executable, "-c", "from server.cli import main; main()", "serve"]
        options = (*options, "--port", "0", "--threads", "1", "--grace", str(GRACE))
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, str(package), *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **environment, MARK: str(log)},
                process_group=0,
            )
        servers.append(Server(process, log))
        return servers[-1]

    yield start_server
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of two cores and, as it believes, a GPU; its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **NO_TOKEN},
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate("")


def _first_refusal(client: Client) -> str | None:
    """Return why the first stream failed that did; its worker may have gone with Ray amid it."""
    while True:
        try:
            list(client.stream("package", "w3", ignore_eos=True))
        except Unavailable as refused:
            return refused.reason


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_loss_of_a_server_of_ray_drains_and_ends_the_command(
    start: Callable[..., Server], part: str
) -> None:
    server = start()
    address = server.wait_until(r"^serving .* on (\S+);")[1]

    with ThreadPoolExecutor() as threads, Client(address, max_attempts=1) as client:
        client.generate("package", "w3")
        refused = [threads.submit(_first_refusal, client) for _ in range(4)]
        server.kill_part(part)
        server.wait_until(f"Ray's {part} at .* is gone", seconds=5)
        code = server.process.wait(GRACE + 30)

    assert ([one.result() for one in refused], code) == (["DRAINING"] * 4, 1)
    assert re.search(f"^error: Ray's {part} at .* is gone", server.log.read_text(), re.MULTILINE)
    assert "Traceback" not in server.log.read_text()
    assert server.parts() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_the_whole_process_group_drains_as_one_to_the_command_does(
    start: Callable[..., Server], number: signal.Signals
) -> None:
    server = start()
    server.wait_until("^serving ")

    os.killpg(server.process.pid, number)

    assert server.process.wait(GRACE + 30) == 0
    assert "stopped" in server.log.read_text()
    assert not re.search("error|is gone|Traceback", server.log.read_text())
    assert server.parts() == {}


def test_sigterm_ends_a_command_whose_ray_stands_still(start: Callable[..., Server]) -> None:
    server = start()
    server.wait_until("^serving ")
    (raylet,) = [pid for pid, command in server.parts().items() if "/raylet\0" in command]

    os.kill(raylet, signal.SIGSTOP)
    server.process.terminate()

    assert server.process.wait(GRACE + 60) == 1
    assert server.parts() == {}


def test_killed_server_leaves_nothing_to_the_next(start: Callable[..., Server]) -> None:
    first = start("--http-port", "0")
    first.wait_until("^serving ")
    ports = first.ports()
    first.process.kill()
    first.process.wait()
    first.wait_until_nothing_is_left(5)

    second = start()
    second.wait_until(r"removed \S*/tokenweir-\S+, which a killed server had left")
    second.wait_until("^serving ")
    second.process.send_signal(signal.SIGHUP)

    assert any("/raylet " in command for command in ports)
    assert not [command for command in ports if re.match(r"ray::Dash|\S+ \S*dashboard", command)]
    assert all(host.endswith("0100007F") for hosts in ports.values() for host in hosts), ports
    assert second.process.wait(GRACE + 30) == 0
    assert second.parts() == {}


def test_failure_inside_a_worker_is_told_with_the_clients_request_id(
    start: Callable[..., Server],
) -> None:
    server = start()
    address = server.wait_until(r"^serving .* on (\S+);")[1]

    with Client(address) as client, pytest.raises(TokenweirClientError):
        client.generate("package", "w3", banned_tokens=[10**6], request_id="mine-7")

    told = server.wait_until("^.*mine-7.*$", seconds=10)[0]
    assert re.search(r"worker 127\.0\.0\.1:\d+: request .* status=INVALID_ARGUMENT", told)


def test_services_of_one_cluster_have_names_of_their_own(
    start: Callable[..., Server], cluster: str
) -> None:
    first = start("--name", "one", RAY_ADDRESS=cluster, **NO_TOKEN)
    first.wait_until("^serving ")

    twin = start("--name", "one", RAY_ADDRESS=cluster, **NO_TOKEN)
    assert twin.process.wait(60) == 3
    assert "a service named 'one' runs on this Ray cluster already" in twin.log.read_text()

    second = start("--name", "two", RAY_ADDRESS=cluster, **NO_TOKEN)
    second.wait_until("^serving ")
    third = start("--name", "three", RAY_ADDRESS=cluster, **NO_TOKEN)
    third.wait_until("waiting for cores: 1 more workers want 1 each", seconds=30)

    for server in (third, second, first):
        server.process.terminate()
        assert server.process.wait(GRACE + 40) == 0


def test_workers_have_the_gpus_of_a_cluster_that_they_ask_for(
    start: Callable[..., Server], cluster: str
) -> None:
    first = start("--num-gpus-per-replica", "0.6", RAY_ADDRESS=cluster, **NO_TOKEN)
    first.wait_until("^serving ")

    second = start(
        "--num-gpus-per-replica", "0.5", "--name", "two", RAY_ADDRESS=cluster, **NO_TOKEN
    )
    second.wait_until("waiting for GPUs: 1 more workers want 0.5 each, and of the 1", seconds=30)

    first.process.terminate()
    assert first.process.wait(GRACE + 40) == 0
    second.wait_until("^serving ")
    second.process.terminate()
    assert second.process.wait(GRACE + 40) == 0


def test_workers_of_a_killed_command_leave_the_cluster_that_it_had_joined(
    start: Callable[..., Server], cluster: str
) -> None:
    first = start("--name", "one", RAY_ADDRESS=cluster, **NO_TOKEN)
    first.wait_until("^serving ")
    other = start("--name", "two", RAY_ADDRESS=cluster, **NO_TOKEN)
    other.wait_until("^serving ")
    pid = int(first.wait_until(r"joined: .*process (\d+)")[1])

    first.process.kill()
    deadline = time.monotonic() + 40
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)

    assert not Path(f"/proc/{pid}").exists()
    again = start("--name", "one", RAY_ADDRESS=cluster, **NO_TOKEN)
    again.wait_until("^serving ")
    assert "left" not in other.log.read_text()
    for server in (again, other):
        server.process.terminate()
        assert server.process.wait(GRACE + 40) == 0
