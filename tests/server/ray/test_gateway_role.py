"""Gateways by themselves: each hears of a service's workers, and none needs another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenweir import AsyncClient, Unavailable

from engine.errors import ConfigError
from server.auth.peers import Peers, peers_of
from server.cli.app import run
from server.config import gateway_config
from server.gateway.gateway import Gateway
from server.gateway.traffic import ModelVersion, Traffic
from server.ray.gateway_role import running_gateway_role
from server.ray.publication import Publication
from server.ray.registry import Registry, WorkerInfo
from server.ray.roster import Roster, RosterAddress, connect
from server.ray.roster_follower import RosterFollower
from server.ray.roster_link import RosterLink
from server.settings import Limits, Listen, Settings
from tests.fakes.calls import generate, stream, stubs_for, until
from tests.fakes.clock import FakeClock
from tests.fakes.engines import FakeGenerator, running_worker

WORKERS = [WorkerInfo(f"127.0.0.1:{n}", pid=n, replica_id=str(n)) for n in (1, 2)]
CONFIG = Settings(listen=Listen(port=0, grace=5), limits=Limits(worker_wait=60))


class _Gateway:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.told: list[tuple[Mapping[str, object], list[str]]] = []
        self.peers: list[Peers | None] = []

    def trust(self, peers: Peers | None) -> None:
        self.peers.append(peers)

    async def sync(self, workers: list[str]) -> None:
        self.workers = workers

    async def divide(self, traffic: Mapping[str, object]) -> None:
        self.told.append((traffic, [*self.workers]))


@asynccontextmanager
async def listening(peers: Peers | None = None) -> AsyncIterator[tuple[Roster, RosterAddress]]:
    roster = Roster(Registry())
    try:
        yield roster, await roster.start("127.0.0.1", peers)
    finally:
        await roster.close()


@asynccontextmanager
async def living(address: RosterAddress, worker: WorkerInfo) -> AsyncIterator[RosterLink]:
    """A worker that tells a roster that it is alive."""
    link = RosterLink(address)
    link.alive(worker)
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def following(
    *found: RosterAddress | None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[_Gateway]:
    """A gateway that finds these rosters one after the other, the last one ever again."""
    rosters, gateway = list(found), _Gateway()

    async def find() -> RosterAddress | None:
        return rosters.pop(0) if len(rosters) > 1 else rosters[0]

    task = asyncio.create_task(RosterFollower(find, gateway, clock).follow())
    try:
        yield gateway
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("peers", [None, peers_of("10.0.0.7")])
async def test_a_gateway_hears_of_workers(peers: Peers | None) -> None:
    async with listening(peers) as (roster, address), following(address) as gateway:
        async with living(address, WORKERS[0]), living(address, WORKERS[1]):
            await until(lambda: sorted(gateway.workers) == ["127.0.0.1:1", "127.0.0.1:2"])
            assert (roster.num_followers, roster.num_workers) == (1, 2)
        await until(lambda: not gateway.workers)

    assert gateway.peers == [peers]


async def test_a_gateway_hears_of_the_traffic_before_it_hears_of_workers() -> None:
    traffic = Traffic()
    traffic.close(ModelVersion("dates", "2"))
    async with listening() as (roster, address):
        roster.traffic = traffic.told
        async with living(address, WORKERS[0]), following(address) as gateway:
            await until(lambda: bool(gateway.told))
            assert gateway.told[0] == ({"shares": {}, "closed": [["dates", "2"]]}, [])
            await until(lambda: bool(gateway.workers))
            traffic.open(ModelVersion("dates", "2"), 100)
            await until(lambda: gateway.told[-1][0] == traffic.told())


async def test_a_gateway_that_goes_leaves_the_roster_to_the_others() -> None:
    async with listening() as (roster, address), following(address) as stays:
        async with following(address):
            await until(lambda: roster.num_followers == 2)
        await until(lambda: roster.num_followers == 1)
        async with living(address, WORKERS[0]):
            await until(lambda: stays.workers == ["127.0.0.1:1"])


async def test_workers_stay_known_when_the_roster_is_lost_and_while_another_is_young(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr("server.ray.roster_follower.HEARTBEAT", 0.01)  # between two attempts
    caplog.set_level(logging.INFO, logger="server")
    async with contextlib.AsyncExitStack() as first, listening() as (_, later):
        roster, address = await first.enter_async_context(listening())
        link = await first.enter_async_context(living(address, WORKERS[0]))
        async with following(address, None, later, clock=clock) as gateway:
            await until(lambda: gateway.workers == ["127.0.0.1:1"])
            await roster.close()
            await until(lambda: "those known stay" in caplog.text)
            assert gateway.workers == ["127.0.0.1:1"]
            async with living(later, WORKERS[1]):
                await until(lambda: len(gateway.workers) == 2)
            assert "are told again" in caplog.text
        await link.close()


async def test_a_worker_finds_a_roster_that_is_elsewhere_by_now() -> None:
    async with listening() as (roster, address):
        async with listening() as (_, before):
            pass  # closed: nobody is there

        async def find() -> RosterAddress:
            return address

        link = RosterLink(before, find=find)
        link.alive(WORKERS[0])
        await until(lambda: roster.num_workers == 1)
        await link.close()


async def test_strangers_hear_nothing() -> None:
    async with listening() as (roster, address):
        reader, writer = await connect(address)
        writer.write(json.dumps({"token": "guessed", "pid": 1, "follows": True}).encode() + b"\n")

        assert await reader.read() == b""
        assert roster.num_followers == 0
        writer.close()


async def test_a_worker_that_leaves_waits_for_its_calls_while_other_gateways_send_some() -> None:
    async with listening() as (roster, address), living(address, WORKERS[0]) as link:
        await until(lambda: roster.num_workers == 1)
        roster.end()
        async with following(address):
            await until(lambda: roster.num_followers == 1)
            assert not await link.leave()
        await until(lambda: roster.num_followers == 0)
        assert await link.leave()


@pytest.mark.parametrize("peers", [None, peers_of("10.0.0.7")])
def test_what_a_service_tells_is_read_as_it_was_written(peers: Peers | None) -> None:
    told = Publication(RosterAddress("10.0.0.7", 1, "secret", peers), 1 << 20, 33)

    assert Publication.from_json(told.to_json()) == told


@asynccontextmanager
async def role(address: RosterAddress, batch: int = 33) -> AsyncIterator[tuple[str, Gateway]]:
    """One more gateway, as the command runs it, with what a cluster would tell."""
    told = Publication(address, 1 << 20, batch)
    async with running_gateway_role(CONFIG, lambda: told) as running:
        yield running


async def test_two_gateways_share_workers_and_one_that_ends_takes_nothing_with_it() -> None:
    engines = FakeGenerator(), FakeGenerator()
    async with (
        listening() as (_, address),
        running_worker(engines[0]) as (_, one),
        running_worker(engines[1]) as (_, two),
        contextlib.AsyncExitStack() as links,
    ):
        for where in (one, two):
            link = RosterLink(address)
            links.push_async_callback(link.close)
            link.alive(WorkerInfo(where, pid=1, replica_id=where))
        async with role(address) as (stays, gateway), stubs_for(stays) as stubs:
            async with role(address) as (goes, other), stubs_for(goes) as others:
                await until(lambda: gateway.num_serving == other.num_serving == 2)
                held = [others.generation.GenerateStream(stream("HOLD")) for _ in range(4)]
                for call in held:
                    await call.initial_metadata()
                assert [len(engine.requests) for engine in engines] == [2, 2]
                for engine in engines:
                    engine.release.set()
                assert all([[message async for message in call] for call in held])
            await stubs.generation.Generate(generate("a"))


async def test_two_gateways_hand_a_worker_one_batch_together() -> None:
    engine = FakeGenerator()
    async with (
        listening() as (_, address),
        running_worker(engine) as (_, where),
        contextlib.AsyncExitStack() as stack,
    ):
        link = RosterLink(address)
        stack.push_async_callback(link.close)
        link.alive(WorkerInfo(where, pid=1, replica_id="a"))
        one_at, one = await stack.enter_async_context(role(address, batch=4))
        stubs = await stack.enter_async_context(stubs_for(one_at))
        async with role(address, batch=4) as (two_at, two), stubs_for(two_at) as others:
            await until(lambda: one.num_serving == two.num_serving == 1)
            calls = [stubs.generation.Generate(generate("HOLD")) for _ in range(6)]
            await until(lambda: len(engine.requests) == 4)
            await until(lambda: two._pool.backends[0].load == 4)
            calls += [others.generation.Generate(generate("HOLD")) for _ in range(6)]
            await until(lambda: two._admission.num_waiting == 4)
            await until(lambda: len(engine.requests) == 6)  # half a batch is everybody's
            await until(lambda: one._admission._places == 2)

            engine.release.set()
            await asyncio.gather(*calls)
            await until(lambda: one._admission._places == two._admission._places == 4)
            assert len(engine.requests) == 12
        engine.release.clear()
        last = [stubs.generation.Generate(generate("HOLD")) for _ in range(4)]
        await until(lambda: len(engine.requests) == 16)
        engine.release.set()
        await asyncio.gather(*last)


async def test_a_gateway_waits_for_the_service(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (_, address):
        answers: list[Publication | None] = [None, Publication(address, 1 << 20, 33)]
        async with running_gateway_role(CONFIG, lambda: answers.pop(0) if answers else None):
            pass

    assert "nobody serves under the name 'tokenweir' there" in caplog.text


async def test_a_port_that_is_in_use_is_told_before_the_service_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = dataclasses.replace(CONFIG.listen, port=taken.getsockname()[1])
        changed = dataclasses.replace(CONFIG, listen=listen)
        with pytest.raises(ConfigError, match="Address already in use.*--port"):
            async with asyncio.timeout(60):
                async with running_gateway_role(changed, lambda: None):
                    pass


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:10001", "10.0.0.1", ""])
def test_an_address_that_is_no_head_is_refused(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["gateway", "--ray-address", address]) == 2

    assert f"--ray-address ({address}) must be HOST:PORT" in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, str]]:
    """The settings and clusters of gateways that the command would run."""
    found: list[tuple[Settings, str]] = []
    monkeypatch.setattr(
        "server.ray.gateway_role.run_gateway",
        lambda config, address, announce: found.append((config, address)),
    )
    monkeypatch.setattr("server.telemetry.logs.log_to_stderr", lambda config: None)
    return found


def test_the_command_takes_the_options_of_a_gateway(started: list[tuple[Settings, str]]) -> None:
    options = "--name a --port 7 --no-prefix-affinity --grace 3 --admin-port 0 --metrics-port 9"

    assert run(["gateway", "--ray-address", "10.0.0.1:6379", *options.split()]) == 0

    ((config, address),) = started
    assert (address, config.listen.name, config.listen.grace) == ("10.0.0.1:6379", "a", 3.0)
    assert (config.listen.port, config.listen.prefix_affinity) == (7, False)
    assert (config.admin.port, config.metrics.port) == (0, 9)


_FILE = """
[packages]
models = { dates = "nowhere" }
[listen]
name = "shop"
port = 7
grace = 4.0
[engine]
max_queue_size = 5
[limits]
worker_wait = 2.5
max_concurrent_calls = 77
max_open_bytes = 1234567
contended_calls_per_worker = 3
client_keepalive_timeout = 9.0
[admin]
port = 0
[log]
requests = false
[metrics]
port = 9
[tracing]
sample_ratio = 0.5
"""


def test_the_command_takes_the_file_of_its_service_and_options_win_over_it(
    started: list[tuple[Settings, str]], tmp_path: Path
) -> None:
    (tmp_path / "serve.toml").write_text(_FILE)
    typed = ["gateway", "--ray-address", "10.0.0.1:6379", "--config", str(tmp_path / "serve.toml")]

    assert run([*typed, "--port", "8", "--log-level", "error"]) == 0

    ((config, _),) = started
    listen, gateway = config.listen, gateway_config(config)
    assert (listen.name, listen.grace, gateway.host, gateway.port) == ("shop", 4, "127.0.0.1", 8)
    assert (gateway.worker_wait, gateway.max_concurrent_calls) == (2.5, 77)
    assert (gateway.max_open_bytes, gateway.contended_calls_per_worker) == (1234567, 3)
    assert (gateway.client_keepalive_timeout, gateway.admin.port) == (9.0, 0)
    assert gateway.prefix_affinity
    assert (config.log.requests, config.log.level) == (False, "error")
    assert (config.metrics.port, config.tracing.sample_ratio) == (9, 0.5)


def test_its_settings_are_printed_as_a_file_and_nothing_is_relayed(
    started: list[tuple[Settings, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(_FILE)

    assert run(["gateway", "--config", str(file), "--port", "8", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert not started

    (tmp_path / "again.toml").write_text(printed)
    for typed in ([str(file), "--port", "8"], [str(tmp_path / "again.toml")]):
        assert run(["gateway", "--ray-address", "10.0.0.1:6379", "--config", *typed]) == 0
    first, again = started
    assert first == again
    assert {*tomllib.loads(printed)} == {
        *("listen", "tls", "auth", "admin", "limits", "log", "metrics", "tracing")
    }
    assert "port = 8  # --port\n" in printed
    assert f"worker_wait = 2.5  # {file}\n" in printed
    assert "prefix_affinity = true  # default\n" in printed
    assert "max_queue_size" not in printed, "it has no engines"


def test_the_cluster_is_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    assert run(["gateway"]) == 2

    assert "give --ray-address (or RAY_ADDRESS)" in capsys.readouterr().err


def test_a_gateway_that_strangers_could_call_is_refused() -> None:
    assert run(["gateway", "--ray-address", "10.0.0.1:6379", "--host", "0.0.0.0"]) == 3


def test_workers_that_no_gateway_could_find_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    assert run(["serve", "--model", "dates=nowhere", "--no-gateway"]) == 3

    assert "listen.gateway (false) leaves workers that no gateway finds" in capsys.readouterr().err


async def test_gateways_restarted_one_after_the_other_under_load_lose_no_call() -> None:
    engine, answers = FakeGenerator(), 0
    async with (
        listening() as (_, address),
        running_worker(engine) as (_, where),
        contextlib.AsyncExitStack() as stack,
    ):
        link = RosterLink(address)
        stack.push_async_callback(link.close)
        link.alive(WorkerInfo(where, pid=1, replica_id="a"))
        ends = [await _started(address), await _started(address)]
        ports = [where for _, where in ends]

        async def keep_asking(number: int) -> None:
            nonlocal answers
            async with (
                AsyncClient(ports[0], max_attempts=1) as one,
                AsyncClient(ports[1], max_attempts=1) as two,
            ):
                while True:
                    try:
                        client = (one, two)[number % 2]
                        answer = await client.generate("dates", "a b")
                    except Unavailable:  # it was not taken: a balancer would ask the other
                        number += 1
                        await asyncio.sleep(0.01)
                    else:
                        assert answer.text == "a b "
                        answers += 1

        asking = [asyncio.create_task(keep_asking(number)) for number in range(4)]
        for number in range(2):
            before = answers
            await until(lambda before=before: answers > before + 20)  # type: ignore[misc]
            await ends[number][0].aclose()
            ends[number] = await _started(address, int(ports[number].rpartition(":")[2]))
        for end, _ in ends:
            stack.push_async_callback(end.aclose)
        for task in asking:
            task.cancel()
        ends_of = await asyncio.gather(*asking, return_exceptions=True)

        assert [type(end) for end in ends_of] == [asyncio.CancelledError] * 4, ends_of


async def _started(address: RosterAddress, port: int = 0) -> tuple[contextlib.AsyncExitStack, str]:
    """Return a gateway that serves, as what ends it, and where it is."""
    config = dataclasses.replace(CONFIG, listen=dataclasses.replace(CONFIG.listen, port=port))
    stack = contextlib.AsyncExitStack()
    role = running_gateway_role(config, lambda: Publication(address, 1 << 20, 33))
    where, gateway = await stack.enter_async_context(role)
    await until(lambda: gateway.num_serving == 1)
    return stack, where
