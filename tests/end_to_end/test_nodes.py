"""Two nodes of Ray on this machine: workers on both, gateways by themselves, and a node lost.

The models are those of test_end_to_end: random, so what counts is that every text is the one of the
eager model.
"""

# ruff: noqa: F811 - fixtures are imported by the names that arguments have
from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenweir import AsyncClient

from tests.end_to_end.test_end_to_end import (  # noqa: F401 - fixtures
    CONTINUE,
    checkpoints,
    eager,
    packages,
    single_thread,
)
from tests.fakes.traces import traced  # noqa: F401 - a fixture
from tests.server.test_deploy_files import RAY_SERVICE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),  # importing Ray warns
]
NUM_TOKENS = 120
Eager = Callable[[str, str, int], str]


@dataclass
class Command:
    """A running command of ours."""

    process: subprocess.Popen[str]
    log: Path

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until a text is in what it writes, so often."""
        deadline = time.monotonic() + 60
        while self.log.read_text().count(text) < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def num_workers(self) -> int:
        """Return how many workers a gateway knows."""
        text = self.log.read_text()
        return text.count(" joined: worker") - text.count(" left: worker")

    def wait_for_workers(self, count: int) -> None:
        """Wait until a gateway knows so many."""
        deadline = time.monotonic() + 60
        while self.num_workers() != count:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@contextmanager
def running(log: Path, words: list[str], **environment: str) -> Iterator[Command]:
    with log.open("a") as file:
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        yield Command(process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def tokenweir(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from server.cli import main; main()", *arguments]


@contextmanager
def gateway(log: Path, ray_address: str, port: int = 0) -> Iterator[tuple[Command, int]]:
    """Run a gateway by itself; yield it and its port once it relays."""
    options = ["--port", str(port), "--grace", "0"]  # SIGTERM cuts streams off, too
    words = tokenweir("gateway", "--ray-address", ray_address, *options)
    with running(log, words) as command:
        count = log.read_text().count("Ctrl-C stops") + 1
        command.wait_for("Ctrl-C stops", count)
        (line,) = [line for line in log.read_text().splitlines() if "Ctrl-C stops" in line][-1:]
        yield command, int(line.split("127.0.0.1:")[1].split(";")[0])


@pytest.fixture
def has_dashboard() -> bool:
    """Whether the cluster of a test has the server that `serve deploy` asks."""
    return False


@pytest.fixture
def cluster(has_dashboard: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose every node has room for one worker."""
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": has_dashboard},
    )
    yield found
    found.shutdown()
    del found
    gc.collect()  # files of its processes that it has not closed


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1)


async def test_a_killed_node_loses_nothing_and_another_takes_its_place(
    cluster: Any,
    packages: dict[str, Path],
    eager: Eager,
    tmp_path: Path,
) -> None:
    second = add_node(cluster)
    options = ["--replicas", "2", "--threads", "1", "--no-gateway", "--package-cache"]
    words = tokenweir("serve", f"file://{packages[CONTINUE]}", *options, str(tmp_path / "cache"))
    logs = tmp_path / "serve", tmp_path / "one", tmp_path / "two"
    with ExitStack() as stack:
        serve = stack.enter_context(running(logs[0], words, RAY_ADDRESS=cluster.address))
        serve.wait_for("Ctrl-C stops")
        gateways = [stack.enter_context(gateway(log, cluster.address)) for log in logs[1:]]
        for command, _ in gateways:
            command.wait_for_workers(2)
        ports = [port for _, port in gateways]
        async with (
            AsyncClient(f"127.0.0.1:{ports[0]}", max_attempts=1, timeout=90) as one,
            AsyncClient(f"127.0.0.1:{ports[1]}", max_attempts=1, timeout=90) as two,
        ):
            await _lose_a_node(cluster, second, [one, two], eager)
            told = "".join(command.log.read_text() for command, _ in gateways)
            assert "goes on at another" in told, "no stream was amid its text there"
            for command, _ in gateways:
                await asyncio.to_thread(command.wait_for_workers, 1)
            add_node(cluster)  # Ray sets handlers of signals there: in this thread only
            for command, _ in gateways:
                await asyncio.to_thread(command.wait_for_workers, 2)


async def _lose_a_node(cluster: Any, node: Any, clients: list[AsyncClient], eager: Eager) -> None:
    """Kill a node while calls wait and streams run; each is answered as if nothing had happened."""
    prompts = [f"w{10 + number % 8}" for number in range(192)]  # three batches of both nodes
    texts = [""] * len(prompts)
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS}

    async def ask(number: int) -> None:
        client, prompt = clients[number % 2], prompts[number]
        if number % 4 < 2:
            async for piece in client.stream(CONTINUE, prompt, tokens_per_message=1, **options):
                texts[number] += piece
        else:
            texts[number] = (await client.generate(CONTINUE, prompt, **options)).text

    calls = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
    while not any(texts):
        await asyncio.sleep(0.001)
    await asyncio.to_thread(cluster.remove_node, node, False)
    assert not all(call.done() for call in calls), "the node was killed too late"
    await asyncio.gather(*calls)

    assert texts == [eager(CONTINUE, prompt, NUM_TOKENS) for prompt in prompts]


async def test_gateways_restarted_one_after_the_other_lose_nothing_and_streams_go_on(
    cluster: Any,
    packages: dict[str, Path],
    eager: Eager,
    tmp_path: Path,
) -> None:
    add_node(cluster)
    options = ["--replicas", "2", "--threads", "1", "--no-gateway"]
    words = tokenweir("serve", str(packages[CONTINUE]), *options)
    with ExitStack() as stack:
        serve = stack.enter_context(running(tmp_path / "serve", words, RAY_ADDRESS=cluster.address))
        serve.wait_for("Ctrl-C stops")
        logs, ends = (tmp_path / "one", tmp_path / "two"), [ExitStack(), ExitStack()]
        for end in ends:
            stack.enter_context(end)
        gateways = [
            end.enter_context(gateway(log, cluster.address))
            for end, log in zip(ends, logs, strict=True)
        ]
        for number, signal_number in enumerate((signal.SIGKILL, signal.SIGTERM)):
            for command, _ in gateways:
                await asyncio.to_thread(command.wait_for_workers, 2)
            (command, port), (_, other) = gateways[number], gateways[1 - number]
            both = f"ipv4:127.0.0.1:{port},127.0.0.1:{other}"  # it takes the first that answers
            async with AsyncClient(both, max_attempts=5, timeout=90) as client:
                await _lose_a_gateway(client, command, signal_number, eager)
            ends[number].close()
            again = gateway(tmp_path / f"again-{number}", cluster.address, port)
            gateways[number] = ends[number].enter_context(again)


async def _lose_a_gateway(
    client: AsyncClient, gateway: Command, signal_number: int, eager: Eager
) -> None:
    """End a gateway while calls wait and streams run; each is answered as if nothing happened."""
    prompts = [f"w{10 + number % 8}" for number in range(32)]
    texts = [""] * len(prompts)

    async def read(number: int) -> None:
        options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "tokens_per_message": 1}
        async for piece in client.stream(CONTINUE, prompts[number], **options):
            texts[number] += piece

    streams = [asyncio.create_task(read(number)) for number in range(len(prompts))]
    calls = [
        asyncio.create_task(client.generate(CONTINUE, prompt, max_new_tokens=NUM_TOKENS))
        for prompt in prompts
    ]
    while not any(texts):
        await asyncio.sleep(0.001)
    gateway.process.send_signal(signal_number)
    begun = [bool(text) and not task.done() for text, task in zip(texts, streams, strict=True)]
    assert any(begun) and not all(call.done() for call in calls), "the gateway ended too late"
    await asyncio.gather(*streams)
    answers = await asyncio.gather(*calls)

    expected = [eager(CONTINUE, prompt, NUM_TOKENS) for prompt in prompts]
    assert texts == expected
    assert [answer.text for answer in answers] == expected


KILLING_A_WORKER = """
import sys
import ray

ray.init(address=sys.argv[1], log_to_driver=False)
names = [name["name"] for name in ray.util.list_named_actors(all_namespaces=True)]
(name,) = [name for name in names if "Worker" in name]
ray.kill(ray.get_actor(name, namespace="serve"), no_restart=False)
"""


@pytest.mark.parametrize("has_dashboard", [True])
async def test_what_serve_deploy_runs_is_served_by_gateways_alone(
    cluster: Any,
    packages: dict[str, Path],
    eager: Eager,
    tmp_path: Path,
) -> None:
    await _serve_deploy(cluster, packages[CONTINUE], tmp_path / "deploy.yaml")
    with gateway(tmp_path / "gateway", cluster.address) as (command, port):
        command.wait_for_workers(1)
        async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:

            async def ask() -> None:
                answer = await client.generate(CONTINUE, "w12", max_new_tokens=20)
                assert answer.text == eager(CONTINUE, "w12", 20)

            await ask()
            await _run(sys.executable, "-c", KILLING_A_WORKER, cluster.address)
            await asyncio.to_thread(command.wait_for, "left: worker")
            await asyncio.to_thread(command.wait_for_workers, 1)
            await ask()


async def _serve_deploy(cluster: Any, package: Path, file: Path) -> None:
    """Deploy what the RayService of Kubernetes has, with a small package."""
    deployed = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
    (application,) = deployed["applications"]
    application["args"] = {
        "packages": {"models": {CONTINUE: str(package)}},
        "engine": {"num_threads": 1},
    }
    file.write_text(yaml.safe_dump(deployed))
    command = Path(sys.executable).with_name("serve")
    await _run(command, "deploy", file, "--address", f"http://{cluster.webui_url}")


async def _run(*words: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
