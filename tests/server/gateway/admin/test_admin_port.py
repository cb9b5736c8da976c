"""The admin port: every worker at once, for operators only; the public port has none of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir import AsyncClient, Client
from tokenweir.v1 import admin_service_pb2 as pb

from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.settings import Admin
from tests.fakes.calls import DOWN, UP, Stubs, failure_of, generate, stream, stubs_for, until
from tests.fakes.engines import FakeGenerator
from tests.fakes.gateways import entry, num_waiting, running_cell

OPERATOR: Any = (("authorization", "Bearer tw_operator"),)


@dataclass
class Operated:
    """A gateway before two workers, with both of its ports."""

    gateway: Gateway
    public: Stubs
    admin: Stubs
    engines: tuple[FakeGenerator, ...]
    workers: tuple[Stubs, ...]

    def num_requests(self) -> int:
        return sum(len(engine.requests) for engine in self.engines)


@pytest.fixture
async def operated(tmp_path: Path) -> AsyncIterator[Operated]:
    tokens = tmp_path / "operators.toml"
    tokens.write_text(entry("tw_operator", tenant="ann"))
    admin = Admin(port=0, tokens=tokens)
    engines = (FakeGenerator(), FakeGenerator())
    async with AsyncExitStack() as stack:
        config = GatewayConfig(worker_wait=60, admin=admin)
        cell = await stack.enter_async_context(running_cell(*engines, config=config))
        admin = await stack.enter_async_context(stubs_for(f"127.0.0.1:{cell.gateway.admin_port}"))
        workers = [await stack.enter_async_context(stubs_for(one)) for one in cell.addresses]
        yield Operated(cell.gateway, cell.stubs, admin, engines, tuple(workers))


def abort(*request_ids: str) -> pb.AbortRequestsRequest:
    return pb.AbortRequestsRequest(request_ids=request_ids)


async def test_the_public_port_operates_nothing(operated: Operated) -> None:
    admin = operated.public.admin
    calls = {
        "LoadModel": admin.LoadModel(pb.LoadModelRequest()),
        "UnloadModel": admin.UnloadModel(pb.UnloadModelRequest()),
        "Drain": admin.Drain(pb.DrainRequest()),
        "AbortRequests": admin.AbortRequests(abort("a")),
        "GetServerInfo": admin.GetServerInfo(pb.GetServerInfoRequest()),
        "GetLoad": admin.GetLoad(pb.GetLoadRequest()),
    }

    for name, call in calls.items():
        refused = await failure_of(call)
        assert refused.code is grpc.StatusCode.UNIMPLEMENTED
        assert f"{name} is not for this port" in refused.message
    models = await admin.ListModels(pb.ListModelsRequest())
    assert [model.model for model in models.models] == ["dates"]
    assert await operated.public.still_serves()


async def test_only_an_operator_operates_it_and_health_is_open(operated: Operated) -> None:
    admin = operated.admin

    refused = await failure_of(admin.admin.Drain(pb.DrainRequest()))

    assert (refused.code, refused.reason) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "UNAUTHENTICATED",
    )
    assert await admin.health_of("") == await operated.public.health_of("") == UP


async def test_the_log_tells_who_has_changed_something_and_not_who_looks(
    operated: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    admin = operated.admin.admin
    with caplog.at_level(logging.INFO, "server.gateway"):
        await admin.GetLoad(pb.GetLoadRequest(), metadata=OPERATOR)
        await admin.GetServerInfo(pb.GetServerInfoRequest(), metadata=OPERATOR)
        await admin.ListModels(pb.ListModelsRequest(), metadata=OPERATOR)
        await admin.AbortRequests(abort("a"), metadata=OPERATOR)

    told = [message for message in caplog.messages if "asked by" in message]
    assert told == ["/tokenweir.v1.AdminService/AbortRequests, asked by ann"]


async def test_load_and_server_are_those_of_all_workers(operated: Operated) -> None:
    admin = operated.admin.admin

    load = await admin.GetLoad(pb.GetLoadRequest(), metadata=OPERATOR)
    info = await admin.GetServerInfo(pb.GetServerInfoRequest(), metadata=OPERATOR)

    assert [(r.model, r.running) for r in load.replicas] == [("dates", 3)] * 2
    replicas = {one.replica_id for one in load.replicas}
    assert len(replicas) == 2
    assert {one.replica_id for one in info.replicas} == replicas
    assert {one.version for one in info.replicas} == {info.version} != {""}
    assert info.instance_id and info.instance_id not in replicas


async def test_requests_are_aborted_wherever_they_are(operated: Operated) -> None:
    operated.gateway._admission.set_slots(1)
    running = operated.public.generation.GenerateStream(stream("a HOLD", request_id="running"))
    await until(lambda: operated.num_requests() == 1)
    waiting = operated.public.generation.Generate(generate("a", request_id="waiting"))
    await until(lambda: num_waiting(operated.gateway) == 1)
    elsewhere = operated.workers[0].generation.Generate(generate("HOLD", request_id="elsewhere"))
    await until(lambda: operated.num_requests() == 2)

    request = abort("elsewhere", "unknown", "running", "waiting", "running")
    answer = await operated.admin.admin.AbortRequests(request, metadata=OPERATOR)

    assert list(answer.aborted) == ["elsewhere", "running", "waiting"]
    for call, name in ((running, "running"), (waiting, "waiting"), (elsewhere, "elsewhere")):
        failed = await failure_of(call)
        assert (failed.code, failed.reason) == (grpc.StatusCode.ABORTED, "ABORTED_BY_OPERATOR")
        assert failed.metadata["request_id"] == name
    await until(lambda: sum(len(engine.aborted) for engine in operated.engines) == 2)
    assert operated.num_requests() == 2  # the one that waited has never run
    assert await operated.public.still_serves()


async def test_a_drain_refuses_new_calls_everywhere_and_ends_with_the_last_one(
    operated: Operated,
) -> None:
    call = operated.public.generation.GenerateStream(stream("HOLD"))
    await until(lambda: operated.num_requests() == 1)

    draining = asyncio.ensure_future(
        operated.admin.admin.Drain(pb.DrainRequest(), metadata=OPERATOR)
    )
    await operated.public.wait_for_health("", DOWN)
    refused = await failure_of(operated.public.generation.Generate(generate("a")))
    assert not draining.done()
    for engine in operated.engines:
        engine.release.set()

    assert len([message async for message in call]) == 3
    await draining
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    for worker in operated.workers:
        assert await worker.health_of("") == DOWN
        assert (await failure_of(worker.generation.Generate(generate("a")))).reason == "DRAINING"


@pytest.mark.parametrize("name", ["LoadModel", "UnloadModel", "SetTraffic"])
async def test_who_starts_no_workers_loads_no_models(name: str, operated: Operated) -> None:
    request = getattr(pb, f"{name}Request")()

    for asked in (operated.admin, operated.workers[0]):
        refused = await failure_of(getattr(asked.admin, name)(request, metadata=OPERATOR))

        assert refused.code is grpc.StatusCode.UNIMPLEMENTED
        assert f"{name} is not for a " in refused.message


async def test_the_list_of_operators_tells_shares_and_workers(operated: Operated) -> None:
    found = await operated.admin.admin.ListModels(pb.ListModelsRequest(), metadata=OPERATOR)

    (model,) = found.models
    assert (model.model, model.traffic.share, model.traffic.replicas) == ("dates", 100, 2)
    assert (
        not (await operated.public.admin.ListModels(pb.ListModelsRequest()))
        .models[0]
        .HasField("traffic")
    )


async def test_a_worker_that_does_not_answer_is_left_out(
    operated: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = operated.gateway.pool.addresses()
    await operated.gateway.pool.sync([*addresses, "127.0.0.1:1"])

    load = await operated.admin.admin.GetLoad(pb.GetLoadRequest(), metadata=OPERATOR)

    assert len(load.replicas) == 2
    assert "worker 127.0.0.1:1 did not answer" in caplog.text


async def test_the_client_operates_a_server(operated: Operated) -> None:
    running = operated.public.generation.GenerateStream(stream("HOLD", request_id="running"))
    await until(lambda: operated.num_requests() == 1)
    address = f"127.0.0.1:{operated.gateway.admin_port}"

    async with AsyncClient(address, token="tw_operator") as client:
        info = await client.server_info()
        assert {load.replica_id for load in await client.load()} == {
            replica.replica_id for replica in info.replicas
        }
        assert await client.abort("running", "unknown") == ("running",)
        await client.drain()
    with Client(address, token="tw_operator") as client_of_threads:
        assert await asyncio.to_thread(client_of_threads.abort, "running") == ()
        await asyncio.to_thread(client_of_threads.drain)

    assert (await failure_of(running)).reason == "ABORTED_BY_OPERATOR"
    assert await operated.public.health_of("") == DOWN
