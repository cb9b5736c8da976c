"""Gateways by themselves: each hears of a service's workers, and none needs another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenweir import AsyncClient, Unavailable

from engine.errors import ConfigError
from server.cli.app import run
from server.config import gateway_config
from server.gateway.gateway import Gateway
from server.ray.entries import SERVICE
from server.ray.gateway_role import _wait_for, running_gateway_role
from server.settings import Limits, Listen, Settings
from tests.fakes.calls import generate, stream, stubs_for, until
from tests.fakes.engines import FakeGenerator, running_worker
from tests.fakes.gateways import num_waiting
from tests.fakes.table import FakeTable, worker_at

CONFIG = Settings(listen=Listen(port=0, grace=5), limits=Limits(worker_wait=60))


@asynccontextmanager
async def role(table: FakeTable) -> AsyncIterator[tuple[str, Gateway]]:
    """One more gateway, as the command runs it, of the service of a table."""
    async with running_gateway_role(CONFIG, table) as running:
        yield running


def table_with(*addresses: str, batch: int = 33) -> FakeTable:
    """Return the table of a service with workers."""
    table = FakeTable()
    table.serve(batch=batch)
    for address in addresses:
        table.publish(worker_at(address))
    return table


async def test_two_gateways_share_workers_and_one_that_ends_takes_nothing_with_it() -> None:
    engines = FakeGenerator(), FakeGenerator()
    async with (
        running_worker(engines[0]) as (_, one),
        running_worker(engines[1]) as (_, two),
    ):
        table = table_with(one, two)
        async with role(table) as (stays, gateway), stubs_for(stays) as stubs:
            async with role(table) as (goes, other), stubs_for(goes) as others:
                await until(lambda: gateway.pool.num_serving == other.pool.num_serving == 2)
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
        running_worker(engine) as (_, where),
        contextlib.AsyncExitStack() as stack,
    ):
        table = table_with(where, batch=4)
        one_at, one = await stack.enter_async_context(role(table))
        stubs = await stack.enter_async_context(stubs_for(one_at))
        async with role(table) as (two_at, two), stubs_for(two_at) as others:
            await until(lambda: one.pool.num_serving == two.pool.num_serving == 1)
            calls = [stubs.generation.Generate(generate("HOLD")) for _ in range(6)]
            await until(lambda: len(engine.requests) == 4)
            await until(lambda: two.pool.backends[0].load == 4)
            calls += [others.generation.Generate(generate("HOLD")) for _ in range(6)]
            await until(lambda: num_waiting(two) == 4)
            await until(lambda: len(engine.requests) == 6)  # half a batch is everybody's
            await until(lambda: one._admission._num_slots == 2)

            engine.release.set()
            await asyncio.gather(*calls)
            await until(lambda: one._admission._num_slots == two._admission._num_slots == 4)
            assert len(engine.requests) == 12
        engine.release.clear()
        last = [stubs.generation.Generate(generate("HOLD")) for _ in range(4)]
        await until(lambda: len(engine.requests) == 16)
        engine.release.set()
        await asyncio.gather(*last)


async def test_a_gateway_waits_for_the_service(caplog: pytest.LogCaptureFixture) -> None:
    table = FakeTable()

    async def begin() -> None:
        await until(lambda: "waiting for the service" in caplog.text)
        table.serve()

    beginning = asyncio.create_task(begin())
    async with role(table):
        await beginning

    assert "nobody serves under the name 'tokenweir' there" in caplog.text


async def test_limits_that_have_changed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    table = table_with()
    async with role(table):
        table.serve(batch=7)
        await until(lambda: "has other limits by now; start this gateway again" in caplog.text)


async def test_a_port_that_is_in_use_is_told_before_the_service_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = dataclasses.replace(CONFIG.listen, port=taken.getsockname()[1])
        changed = dataclasses.replace(CONFIG, listen=listen)
        with pytest.raises(ConfigError, match="Address already in use.*--port"):
            async with asyncio.timeout(60):
                async with running_gateway_role(changed, FakeTable()):
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
        running_worker(engine) as (_, where),
        contextlib.AsyncExitStack() as stack,
    ):
        table = table_with(where)
        ends = [await _started(table), await _started(table)]
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
            ends[number] = await _started(table, int(ports[number].rpartition(":")[2]))
        for end, _ in ends:
            stack.push_async_callback(end.aclose)
        for task in asking:
            task.cancel()
        ends_of = await asyncio.gather(*asking, return_exceptions=True)

        assert [type(end) for end in ends_of] == [asyncio.CancelledError] * 4, ends_of


async def _started(table: FakeTable, port: int = 0) -> tuple[contextlib.AsyncExitStack, str]:
    """Return a gateway that serves, as what ends it, and where it is."""
    config = dataclasses.replace(CONFIG, listen=dataclasses.replace(CONFIG.listen, port=port))
    stack = contextlib.AsyncExitStack()
    where, gateway = await stack.enter_async_context(running_gateway_role(config, table))
    await until(lambda: gateway.pool.num_serving == 1)
    return stack, where


async def test_a_gateway_waits_for_a_service_of_a_release_that_it_can_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.ray.gateway_role._PAUSE", 0.001)
    table = FakeTable()
    table.put(SERVICE, b'{"certificate": {"key": "secret"}}')

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_wait_for(table, "tokenweir"))
        await until(lambda: "not one that this release reads" in caplog.text)
        table.serve()

    assert (await waiting).id == "s"
    assert "secret" not in caplog.text
