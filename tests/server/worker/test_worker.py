"""A worker's life: health, reflection, its outer wall, draining, engines that fail."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2
from tokenweir.v1 import admin_service_pb2

from engine.errors import ConfigError, PackageError
from server.config import WorkerConfig
from server.listening import address_of
from server.worker.worker import Worker
from tests.fakes.calls import DOWN, UP, failure_of, generate, stream, stubs_for, until
from tests.fakes.engines import FakeGenerator, FakePredictor, running_worker

SERVICES = [
    "tokenweir.v1.AdminService",
    "tokenweir.v1.GenerationService",
    "tokenweir.v1.PredictionService",
]


async def test_every_service_and_model_has_a_health_of_its_own() -> None:
    async with (
        running_worker(FakeGenerator(), FakePredictor()) as (worker, address),
        stubs_for(address) as stubs,
    ):
        for name in ("", "dates", "tags", *SERVICES):
            assert await stubs.health_of(name) == UP
        with pytest.raises(aio.AioRpcError) as caught:
            await stubs.health_of("other")

        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert worker.healthy


async def test_an_engine_that_reports_itself_unhealthy_turns_the_health_of_all_it_serves() -> None:
    engine = FakeGenerator()
    async with (
        running_worker(engine, FakePredictor(), config=WorkerConfig(health_period=0.01)) as (
            worker,
            address,
        ),
        stubs_for(address) as stubs,
    ):
        engine.healthy = False

        await stubs.wait_for_health("", DOWN)
        assert await stubs.health_of("dates") == DOWN
        assert await stubs.health_of("tokenweir.v1.GenerationService") == DOWN
        assert await stubs.health_of("tags") == UP
        assert await stubs.health_of("tokenweir.v1.PredictionService") == UP
        assert not worker.healthy
        models = (await stubs.admin.ListModels(admin_service_pb2.ListModelsRequest())).models
        assert [m.state for m in models] == [
            admin_service_pb2.MODEL_STATE_FAILED,
            admin_service_pb2.MODEL_STATE_READY,
        ]


async def test_a_worker_that_warms_up_says_so_and_serves_only_then(unused_tcp_port: int) -> None:
    class Warming(FakeGenerator):
        def __init__(self) -> None:
            super().__init__()
            self.warm = asyncio.Event()
            self.healthy, self.is_warming = False, True

        async def start(self) -> None:
            await self.warm.wait()
            self.healthy, self.is_warming = True, False

    engine = Warming()
    worker = Worker({"dates": engine}, WorkerConfig(port=unused_tcp_port))
    starting = asyncio.create_task(worker.start())
    async with stubs_for(f"127.0.0.1:{unused_tcp_port}") as stubs:
        await asyncio.wait_for(stubs.channel.channel_ready(), 60)
        asked = admin_service_pb2.ListModelsRequest()
        before = (await stubs.admin.ListModels(asked)).models[0].state
        health = [await stubs.health_of(name) for name in ("", "dates", SERVICES[1])]

        assert before == admin_service_pb2.MODEL_STATE_WARMING
        assert health == [DOWN] * 3
        assert not starting.done()

        engine.warm.set()
        await asyncio.wait_for(starting, 60)
        assert (await stubs.admin.ListModels(asked)).models[0].state == (
            admin_service_pb2.MODEL_STATE_READY
        )
        assert await stubs.health_of("dates") == UP
    await worker.drain(grace=0)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services_and_itself(version: str) -> None:
    itself = f"grpc.reflection.{version}.ServerReflection"
    async with running_worker(FakeGenerator()) as (_, address), stubs_for(address) as stubs:
        reflect = stubs.channel.stream_stream(
            f"/{itself}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=itself),
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="tokenweir.v1.GenerationService"
            ),
        ]
        own, services, generation = [answer async for answer in reflect(iter(asked))]

    names = {service.name for service in services.list_services_response.service}
    packages = [
        FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
        for answer in (own, generation)
    ]
    assert {*SERVICES, "grpc.health.v1.Health", itself} <= names
    assert [file.package for file in packages] == [f"grpc.reflection.{version}", "tokenweir.v1"]


async def test_load_counts_the_calls_that_run_a_model() -> None:
    engine = FakeGenerator()
    async with running_worker(engine) as (worker, address), stubs_for(address) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await engine.seen.wait()
        await stubs.admin.GetLoad(admin_service_pb2.GetLoadRequest())
        assert worker.load() == 1

        engine.release.set()

        assert len([message async for message in call]) == 3
        await until(lambda: worker.load() == 0)


async def test_calls_beyond_the_outer_wall_are_refused_with_details_and_health_is_not() -> None:
    engine = FakeGenerator()
    config = WorkerConfig(max_worker_calls=1)
    async with (
        running_worker(engine, config=config) as (_, address),
        stubs_for(address) as stubs,
    ):
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await engine.seen.wait()

        refused = await failure_of(stubs.generation.Generate(generate("a")))

        assert (refused.code, refused.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        assert refused.retry_after is not None
        assert await stubs.health_of("") == UP
        await stubs.admin.GetLoad(admin_service_pb2.GetLoadRequest())
        engine.release.set()
        assert len([message async for message in call]) == 3
        assert await stubs.still_serves()


async def test_requests_of_more_bytes_than_are_held_at_once_are_refused() -> None:
    engine = FakeGenerator()
    async with (
        running_worker(engine, config=WorkerConfig(max_open_bytes=100)) as (_, address),
        stubs_for(address) as stubs,
    ):
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await engine.seen.wait()

        refused = await failure_of(stubs.generation.Generate(generate("a" * 100)))

        assert refused.reason == "QUEUE_FULL"
        call.cancel()


async def test_draining_turns_health_refuses_new_calls_and_lets_running_ones_end() -> None:
    engine = FakeGenerator()
    worker = Worker({"dates": engine}, WorkerConfig())
    async with stubs_for(await worker.start()) as stubs:
        running = asyncio.ensure_future(stubs.generation.Generate(generate("HOLD")))
        watched = asyncio.create_task(stubs.wait_for_health("", DOWN))
        await engine.seen.wait()

        draining = asyncio.create_task(worker.drain(grace=10))
        await watched

        failure = await failure_of(stubs.generation.Generate(generate("a")))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert failure.retry_after == 0.5
        models = await stubs.admin.ListModels(admin_service_pb2.ListModelsRequest())
        assert models.models[0].state == admin_service_pb2.MODEL_STATE_DRAINING
        assert not engine.stopped
        engine.release.set()
        assert (await running).results[0].sequences[0].text == "HOLD "
        await asyncio.wait_for(draining, 60)
        assert engine.stopped


async def test_what_still_runs_after_the_grace_is_told_that_the_worker_drains() -> None:
    engine = FakeGenerator()
    worker = Worker({"dates": engine}, WorkerConfig())
    async with stubs_for(await worker.start()) as stubs:
        call = asyncio.ensure_future(failure_of(stubs.generation.GenerateStream(stream("a HOLD"))))
        await engine.seen.wait()

        await worker.drain(grace=0.05)

        failure = await call
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_an_engine_that_does_not_start_stops_the_others_and_frees_the_port() -> None:
    class Broken(FakeGenerator):
        async def start(self) -> None:
            raise PackageError("a file is damaged")

    good = FakePredictor()
    broken = Broken()
    worker = Worker({"a": good, "b": broken}, WorkerConfig())

    with pytest.raises(PackageError, match="a file is damaged"):
        await worker.start()

    assert good.started
    assert good.stopped
    assert not broken.stopped


def test_a_model_cannot_take_the_name_of_a_service() -> None:
    with pytest.raises(ConfigError, match="GenerationService"):
        Worker({"tokenweir.v1.GenerationService": FakeGenerator()}, WorkerConfig())


def test_addresses_of_ipv6_are_bracketed() -> None:
    assert address_of("127.0.0.1", 80) == "127.0.0.1:80"
    assert address_of("::1", 80) == "[::1]:80"
