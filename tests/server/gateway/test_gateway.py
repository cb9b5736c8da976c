"""The gateway between clients and workers: choice, retries, losses, and what passes through."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2
from tokenweir import AsyncClient, Client, Internal
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import generation_service_pb2_grpc

from engine.errors import EngineFailure, QueueFull, ReplicaLost
from server.calls.status import call_status
from server.config import GatewayConfig
from server.gateway.admission import Admission
from server.gateway.backend import Backend
from server.gateway.gateway import Gateway
from server.gateway.request_head import RequestHead
from server.listening import max_connections
from server.wire.bearer import BearerCall
from tests.fakes.calls import (
    DOWN,
    UP,
    Failure,
    Stubs,
    failure,
    failure_of,
    generate,
    stream,
    until,
)
from tests.fakes.clock import FakeClock
from tests.fakes.engines import OPTIONS, FakeGenerator, FakePredictor, running_worker
from tests.fakes.gateways import Cell, num_running, num_waiting, running_cell, running_gateway
from tests.fakes.processes import worker_process
from tests.fakes.wired_worker import scripted_worker


@pytest.mark.parametrize(
    ("host", "files", "most"),
    [
        ("127.0.0.1", 200, 50),
        ("127.0.0.1", 1024, 864),
        ("127.0.0.1", 20_000, 17_500),
        ("127.0.0.1", resource.RLIM_INFINITY, 917_504),
        ("of.two", 1024, 432),
    ],
)
def test_connections_leave_a_process_files_for_workers_and_ray(
    host: str, files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    monkeypatch.setattr(
        "server.listening.addresses_of", {"127.0.0.1": ["a"], "of.two": ["a", "b"]}.get
    )

    assert max_connections(host) == most


async def test_a_connection_too_many_is_closed_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
    caplog.set_level("INFO")
    gateway = Gateway(GatewayConfig())
    port = await gateway.start()
    try:
        taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        first = [await reader.read(1) for reader, _ in taken]
        taken.append(await asyncio.open_connection("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            assert await taken[2][0].read() == b""

        assert b"" not in first
        assert not any(reader.at_eof() for reader, _ in taken[:2])
        assert "up to 2 connections at once, as open files allow (ulimit -n)" in caplog.text
    finally:
        for _, writer in taken:
            writer.close()
        await gateway.close()


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    async with running_cell(FakeGenerator(), FakeGenerator()) as cell:
        yield cell


async def test_calls_go_to_the_worker_with_the_least_under_way(cell: Cell) -> None:
    calls = [cell.stubs.generation.GenerateStream(stream("HOLD")) for _ in range(8)]
    await until(lambda: sum(cell.requests()) == 8)

    assert cell.requests() == [4, 4]
    for engine in cell.engines:
        engine.release.set()
    for call in calls:
        assert len([message async for message in call]) == 3


async def test_calls_of_a_client_are_divided_between_gateways() -> None:
    engines = FakeGenerator(), FakeGenerator()
    async with running_cell(engines[0]) as one, running_cell(engines[1]) as other:
        addresses = (one.stubs.address, other.stubs.address)
        target = f"ipv4:{','.join(addresses)}"
        async with AsyncClient(target, timeout=60) as client:
            for _ in range(40):
                await client.generate("dates", "a")
            await asyncio.gather(*(client.generate("dates", "a") for _ in range(40)))
        with Client(target, timeout=60) as client:
            for _ in range(40):
                await asyncio.to_thread(client.generate, "dates", "a")

    counts = [len(engine.requests) for engine in engines]
    assert sum(counts) == 120 and min(counts) >= 40


async def test_an_old_connection_takes_no_new_calls_and_ends_with_its_last_one() -> None:
    engine = FakeGenerator()
    config = GatewayConfig(worker_wait=60, max_connection_age=0.3)
    async with running_cell(engine, config=config) as cell:
        stubs = cell.stubs
        call = stubs.generation.GenerateStream(stream("HOLD a"))
        await asyncio.wait_for(engine.seen.wait(), 60)
        await asyncio.wait_for(
            stubs.channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 60
        )
        assert (await stubs.generation.Generate(generate("b"))).results
        engine.release.set()
        messages = [message async for message in call]

    assert messages[-1].HasField("summary")


async def test_connections_may_become_a_month_old() -> None:
    gateway = Gateway(GatewayConfig(max_connection_age=30 * 86400))

    try:
        assert await gateway.start()
    finally:
        await gateway.close()


async def test_unary_answers_and_streams_pass_unchanged(cell: Cell) -> None:
    output = pb.Output(token_ids=True)
    response = await cell.stubs.generation.Generate(generate("a b", request_id="r", output=output))
    call = cell.stubs.generation.GenerateStream(stream("SLOW b"))
    messages = [message async for message in call]

    assert response.results[0].sequences[0].text == "a b "
    assert response.request_id == "r"
    assert [m.sequence_number for m in messages] == [1, 2, 3, 4]
    assert "".join(m.delta.text for m in messages) == "SLOW b "


async def test_many_streams_at_once_say_what_each_says_alone(cell: Cell) -> None:
    async def say(number: int) -> tuple[list[bytes], grpc.StatusCode]:
        text = " ".join(["SLOW"] * (number % 3 == 0) + [f"w{number}"] * (number % 7))
        output = pb.Output(token_ids=number % 2 == 0)
        call = cell.stubs.generation.GenerateStream(stream(text or "a", output=output))
        messages = [message async for message in call]
        for message in messages:  # times, and who has answered
            message.summary.ClearField("timing")
            message.summary.ClearField("provenance")
            message.summary.ClearField("request_id")
        return [message.SerializeToString() for message in messages], await call.code()

    alone = [await say(number) for number in range(60)]
    together = await asyncio.gather(*map(say, range(60)))

    assert together == alone


async def test_a_worker_is_told_how_many_calls_wait_for_it(cell: Cell) -> None:
    cell.gateway._admission.set_slots(1)
    calls = [cell.stubs.generation.GenerateStream(stream("HOLD")) for _ in range(6)]
    await until(lambda: num_waiting(cell.gateway) == 5)

    cell.gateway._admission.set_slots(2)
    await until(lambda: sum(cell.requests()) == 2)

    loads = sorted(worker.load() for worker in cell.workers)
    assert loads == [1, 1 + 2]  # four wait, for two workers
    for call in calls:
        call.cancel()


async def test_initial_metadata_comes_on_admission(cell: Cell) -> None:
    for engine in cell.engines:
        engine.admit.clear()
    call = cell.stubs.generation.GenerateStream(stream("HOLD"))
    metadata = asyncio.create_task(call.initial_metadata())
    await until(lambda: sum(cell.requests()) == 1)
    assert not metadata.done()

    for engine in cell.engines:
        engine.admit.set()

    assert dict(await metadata)["tokenweir-replica"]
    call.cancel()


async def test_errors_of_a_worker_pass_with_their_details(cell: Cell) -> None:
    for engine in cell.engines:
        engine.error = EngineFailure("a step failed")

    unary = await failure_of(cell.stubs.generation.Generate(generate("FAIL", request_id="r")))
    streamed = await failure_of(cell.stubs.generation.GenerateStream(stream("a FAIL")))

    assert (unary.code, unary.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert unary.metadata["request_id"] == "r"
    assert (streamed.code, streamed.message) == (grpc.StatusCode.INTERNAL, "a step failed")
    assert sum(cell.requests()) == 2  # such an error is not retried


async def test_a_refusal_for_want_of_room_is_taken_to_the_other_worker(cell: Cell) -> None:
    refusals = iter([QueueFull("full", 0.3)])

    async def refuse_once(word: str, request: object) -> None:
        for refusal in refusals:
            raise refusal

    for engine in cell.engines:
        engine.obey = refuse_once  # type: ignore[method-assign, assignment]

    response = await cell.stubs.generation.Generate(generate("FAIL"))

    assert response.results[0].sequences[0].text == "FAIL "
    assert cell.requests() == [1, 1]


async def test_when_all_workers_are_full_the_refusal_comes_at_once(cell: Cell) -> None:
    for engine in cell.engines:
        engine.error = QueueFull("full", 0.3)

    refused = await failure_of(cell.stubs.generation.Generate(generate("FAIL")))

    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (refused.retry_after, refused.pushback) == (0.3, "300")
    assert cell.requests() == [1, 1]  # waiting calls ask them again, every now and then


async def test_calls_beyond_the_wall_are_refused_with_details_and_health_is_not() -> None:
    engine = FakeGenerator()
    config = GatewayConfig(max_concurrent_calls=2)
    async with running_cell(engine, config=config) as cell:
        stubs = cell.stubs
        calls = [stubs.generation.GenerateStream(stream("HOLD")) for _ in range(2)]
        await until(lambda: len(engine.requests) == 2)

        refused = [
            await failure_of(stubs.generation.Generate(generate("a"))),
            await failure_of(stubs.generation.GenerateStream(stream("a"))),
        ]

        for one in refused:
            assert (one.code, one.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert one.retry_after is not None
        assert await stubs.health_of("") == UP
        engine.release.set()
        for call in calls:
            assert len([message async for message in call]) == 3
        assert await stubs.still_serves()


async def test_every_call_of_a_great_burst_is_refused_with_details() -> None:
    config = GatewayConfig(max_concurrent_calls=1, worker_wait=120.0)  # a burst may take longer
    async with running_gateway(config=config) as (gateway, stubs):
        held = asyncio.ensure_future(stubs.generation.Generate(generate("a")))
        await until(lambda: num_running(gateway))

        calls = [failure_of(stubs.generation.Generate(generate("a"))) for _ in range(2_000)]
        reasons = Counter(refused.reason for refused in await asyncio.gather(*calls))

        assert reasons == {"QUEUE_FULL": 2_000}
        held.cancel()


async def test_requests_of_more_bytes_than_are_held_at_once_are_refused() -> None:
    engine = FakeGenerator()
    config = GatewayConfig(max_open_bytes=100)
    async with running_cell(engine, config=config) as cell:
        stubs = cell.stubs
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await until(lambda: len(engine.requests) == 1)

        refused = await failure_of(stubs.generation.Generate(generate("a" * 100)))

        assert (refused.code, refused.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        engine.release.set()
        assert len([message async for message in call]) == 3
        assert await stubs.still_serves()


async def test_a_tenant_with_many_calls_does_not_keep_another_waiting() -> None:
    engine = FakeGenerator()
    engine.capabilities += OPTIONS
    engine.admit.clear()
    config = GatewayConfig(max_calls_per_worker=1)
    async with running_cell(engine, config=config) as cell:
        gateway, stubs = cell.gateway, cell.stubs

        async def ask(tenant: str, number: int) -> None:
            scheduling = pb.Scheduling(tenant=tenant)
            await stubs.generation.Generate(generate(f"{tenant} {number}", scheduling=scheduling))

        calls = [asyncio.create_task(ask("flood", i)) for i in range(20)]
        await until(lambda: num_running(gateway) == 20)
        calls.append(asyncio.create_task(ask("other", 0)))
        await until(lambda: num_running(gateway) == 21 and len(engine.requests) > 0)
        assert [request.tenant for request in engine.requests] == ["flood"]
        engine.admit.set()
        await asyncio.gather(*calls)

    assert [request.tenant for request in engine.requests[:3]] == ["flood", "other", "flood"]


async def test_a_call_that_would_come_too_late_is_refused_while_the_event_loop_is_busy() -> None:
    gateway = Gateway(GatewayConfig())
    port = await gateway.start()
    gateway._admission = admission = await _slow_admission()
    waiting = [asyncio.create_task(_have_a_turn(admission)) for _ in range(3)]
    await until(lambda: admission.num_waiting == 2)

    def ask() -> Failure:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                generation.Generate(generate("a", request_id="mine"), timeout=60)
        return failure(caught.value)

    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(ask).result(timeout=60)  # nothing else happens in this one

    assert (refused.reason, refused.metadata["request_id"]) == ("CANNOT_MEET", "mine")
    for task in waiting:
        task.cancel()
    await gateway.close()


async def _slow_admission() -> Admission:
    """Return one with a single place, which is handed over every minute."""
    now = [0.0]
    admission = Admission(clock=lambda: now[0])
    admission.set_slots(1)

    async def have_a_turn() -> None:
        async with admission.slot(RequestHead(), None):
            await asyncio.sleep(0)
            now[0] += 60

    await asyncio.gather(*(have_a_turn() for _ in range(40)))
    return admission


async def _have_a_turn(admission: Admission) -> None:
    async with admission.slot(RequestHead(), None):
        await asyncio.Event().wait()


async def test_a_call_without_a_message_is_refused(cell: Cell) -> None:
    call = cell.stubs.channel.stream_unary("/tokenweir.v1.GenerationService/Generate")()
    await call.done_writing()

    refused = await failure_of(call)

    assert (refused.code, refused.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_MESSAGE",
    )


async def test_metadata_of_the_client_reaches_the_worker_and_back() -> None:
    seen: dict[str, str | bytes] = {}

    async def echo(request: bytes, context: BearerCall) -> bytes:
        seen.update(context.invocation_metadata() or ())
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last-bin", b"\x00\xff"),))
        return request

    async with scripted_worker(echo) as address, running_gateway(address) as (_, stubs):
        call = stubs.channel.unary_unary("/tokenweir.v1.GenerationService/Generate")(
            b"bytes", metadata=(("x-trace", "t"), ("x-bin", b"\x00\x01"))
        )
        assert await call == b"bytes"

        assert (seen["x-trace"], seen["x-bin"]) == ("t", b"\x00\x01")
        assert dict(await call.initial_metadata())["first"] == "1"
        assert dict(await call.trailing_metadata())["last-bin"] == b"\x00\xff"


async def test_the_deadline_of_the_client_reaches_the_worker() -> None:
    remaining: list[float | None] = []

    async def note(request: bytes, context: BearerCall) -> bytes:
        remaining.append(context.time_remaining())
        return request

    async with scripted_worker(note) as address, running_gateway(address) as (_, stubs):
        method = stubs.channel.unary_unary("/tokenweir.v1.GenerationService/Generate")
        await method(b"", timeout=600)
        await method(b"")

    assert remaining[0] is not None
    assert 500 < remaining[0] < 610  # the wire rounds up
    assert remaining[1] is None


async def test_a_cancelled_call_is_cancelled_at_the_worker(cell: Cell) -> None:
    call = cell.stubs.generation.GenerateStream(stream("HOLD"))
    unary = asyncio.ensure_future(cell.stubs.generation.Generate(generate("HOLD")))
    await until(lambda: cell.requests() == [1, 1])

    call.cancel()
    unary.cancel()

    await until(lambda: all(len(engine.aborted) == 1 for engine in cell.engines))


async def test_a_call_waits_for_a_worker_to_come() -> None:
    async with (
        running_gateway() as (gateway, stubs),
        running_worker(FakeGenerator()) as (_, address),
    ):
        call = asyncio.ensure_future(stubs.generation.Generate(generate("a")))
        await until(lambda: num_running(gateway))

        await gateway.pool.sync([address])

        assert (await call).results[0].sequences[0].text == "a "


async def test_without_a_worker_a_call_is_refused_in_the_end() -> None:
    async with running_gateway(config=GatewayConfig(worker_wait=0.05)) as (_, stubs):
        failures = [
            await failure_of(stubs.generation.Generate(generate("a"))),
            await failure_of(stubs.generation.GenerateStream(stream("a"))),
        ]

    for refused in failures:
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
        assert (refused.retry_after, refused.pushback) == (0.5, "500")


async def test_what_the_gateway_itself_refuses_names_the_clients_request() -> None:
    calls: list[Any] = [lambda s: s.generation.Generate(generate("a", request_id="mine"))]
    calls.append(lambda s: s.generation.GenerateStream(stream("a", request_id="mine")))
    named, unnamed = [], []
    async with running_gateway(config=GatewayConfig(worker_wait=0.05)) as (gateway, stubs):
        named += [await failure_of(call(stubs)) for call in calls]
        unnamed.append(await failure_of(stubs.generation.Generate(generate("a"))))
        await gateway.drain(0)
        named += [await failure_of(call(stubs)) for call in calls]

    assert {one.reason for one in named} == {"STARTING", "DRAINING"}
    assert {one.metadata["request_id"] for one in named} == {"mine"}
    assert unnamed[0].metadata["request_id"], "one is made"


async def test_health_follows_the_workers() -> None:
    async with running_gateway() as (gateway, stubs):
        assert await stubs.health_of("") == DOWN
        async with running_worker(FakeGenerator(), FakePredictor()) as (_, address):
            await gateway.pool.sync([address])
            await stubs.wait_for_health("", UP)
            for name in ("dates", "tags", "tokenweir.v1.GenerationService"):
                assert await stubs.health_of(name) == UP

        await stubs.wait_for_health("", DOWN)
        assert await stubs.health_of("dates") == DOWN


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    old, new = FakeGenerator(), FakeGenerator()
    async with (
        running_worker(old) as (old_worker, old_address),
        running_worker(new) as (_, new_address),
        running_gateway(old_address) as (gateway, stubs),
    ):
        running = stubs.generation.GenerateStream(stream("HOLD"))
        await old.seen.wait()
        await gateway.pool.sync([old_address, new_address])
        draining = asyncio.create_task(old_worker.drain(grace=60))

        for _ in range(10):
            await stubs.generation.Generate(generate("a"))
        await gateway.pool.sync([new_address])
        old.release.set()

        assert len([message async for message in running]) == 3
        assert len(new.requests) == 10
        await draining


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services_where_it_is_wanted(version: str) -> None:
    config = GatewayConfig(reflection=True)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async with running_gateway(config=config) as (_, stubs):
        (answer,) = [answer async for answer in _reflection(stubs, version)(iter(asked))]

    names = {service.name for service in answer.list_services_response.service}
    assert {"tokenweir.v1.GenerationService", "grpc.health.v1.Health"} <= names


async def test_reflection_is_not_there_unless_it_is_wanted() -> None:
    async with running_gateway() as (_, stubs):
        assert await _reflection(stubs, "v1")().code() is grpc.StatusCode.UNIMPLEMENTED


def _reflection(stubs: Stubs, version: str) -> Any:
    return stubs.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )


async def test_draining_refuses_new_calls_and_lets_running_ones_end(cell: Cell) -> None:
    running = cell.stubs.generation.GenerateStream(stream("HOLD"))
    await until(lambda: sum(cell.requests()) == 1)
    draining = asyncio.create_task(cell.gateway.drain(grace=60))
    await cell.stubs.wait_for_health("", DOWN)

    refused = await failure_of(cell.stubs.generation.Generate(generate("a")))
    for engine in cell.engines:
        engine.release.set()

    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert len([message async for message in running]) == 3
    await asyncio.wait_for(draining, 60)


async def test_who_asks_again_behind_the_last_answer_is_told_to_go_elsewhere(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.calls.call_server._QUIET", 60.0)
    running = asyncio.ensure_future(cell.stubs.generation.Generate(generate("HOLD")))
    await until(lambda: sum(cell.requests()) == 1)
    draining = asyncio.create_task(cell.gateway.drain(grace=60))
    for engine in cell.engines:
        engine.release.set()
    await running
    await until(lambda: not num_running(cell.gateway))

    refused = await failure_of(cell.stubs.generation.Generate(generate("a")))

    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert not draining.done()
    draining.cancel()


async def test_closing_ends_running_calls_with_a_reason(cell: Cell) -> None:
    call = asyncio.ensure_future(failure_of(cell.stubs.generation.GenerateStream(stream("a HOLD"))))
    await until(lambda: sum(cell.requests()) == 1)

    await cell.gateway.close()

    ended = await call
    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_closing_ends_calls_that_wait_for_a_worker() -> None:
    async with running_gateway() as (gateway, stubs):
        asked = stubs.generation.Generate(generate("a", request_id="mine"))
        call = asyncio.ensure_future(failure_of(asked))
        await until(lambda: num_running(gateway))

        await gateway.close()

        ended = await call
        assert (ended.reason, ended.metadata["request_id"]) == ("DRAINING", "mine")


async def test_a_worker_that_always_dies_is_not_asked_for_ever() -> None:
    calls = Counter[str]()

    async def die(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with scripted_worker(die) as address, running_gateway(address) as (_, stubs):
        with pytest.raises(aio.AioRpcError) as caught:
            await stubs.generation.Generate(generate("poison", request_id="mine"))

    lost = failure(caught.value)
    assert (lost.code, lost.reason) == (grpc.StatusCode.INTERNAL, "REPLICAS_LOST")
    assert lost.metadata["request_id"] == "mine"
    assert (lost.retry_after, lost.pushback) == (None, None)
    assert calls["n"] == 3


@pytest.mark.parametrize("crashed", [True, False])
async def test_a_call_whose_workers_are_killed_from_outside_goes_on_to_the_next(
    crashed: bool,
) -> None:
    calls = Counter[str]()

    async def die(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        if calls["n"] == 5:
            return pb.GenerateResponse().SerializeToString()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with (
        scripted_worker(die) as address,
        running_gateway(address, has_crashed=lambda worker: crashed) as (_, stubs),
    ):
        asked = stubs.generation.Generate(generate("a"))
        if crashed:
            assert (await failure_of(asked)).reason == "REPLICAS_LOST"
        else:
            await asked

    assert calls["n"] == (3 if crashed else 5)


async def test_calls_that_lose_their_workers_together_with_many_others_go_on() -> None:
    calls, all_there = Counter[str](), asyncio.Event()

    async def die(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        if calls["n"] > 4 * 8:
            return pb.GenerateResponse().SerializeToString()
        if calls["n"] % 8 == 0:
            all_there.set()
            all_there.clear()
        else:
            await all_there.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with scripted_worker(die) as address, running_gateway(address) as (_, stubs):
        await asyncio.gather(*(stubs.generation.Generate(generate(f"n{i}")) for i in range(8)))

    assert calls["n"] == 5 * 8


async def test_a_call_that_has_cost_three_workers_is_not_tried_again_by_the_client() -> None:
    calls = Counter[str]()

    async def die(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with scripted_worker(die) as address, running_gateway(address) as (_, stubs):
        async with AsyncClient(stubs.address) as client:
            with pytest.raises(Internal) as caught:
                await client.generate("dates", "poison")

    assert (caught.value.reason, caught.value.retry_after) == ("REPLICAS_LOST", None)
    assert calls["n"] == 3


async def test_a_call_that_asks_again_after_a_long_restart_brings_its_losses_along() -> None:
    calls = Counter[str]()
    stack = AsyncExitStack()

    async def die(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        await gateway.pool.sync([])  # the next one takes longer to start than a call waits
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with stack:
        address = await stack.enter_async_context(scripted_worker(die))
        gateway, stubs = await stack.enter_async_context(
            running_gateway(config=GatewayConfig(worker_wait=0.05))
        )
        reasons = []
        for _ in range(4):
            await gateway.pool.sync([address])
            await until(lambda: gateway.pool.num_serving == 1)  # else the call may wait in vain
            asked = stubs.generation.Generate(generate("poison", request_id="mine"))
            reasons.append((await failure_of(asked)).reason)

    assert reasons == ["REPLICA_LOST", "REPLICA_LOST", "REPLICAS_LOST", "REPLICAS_LOST"]
    assert calls["n"] == 3


async def test_a_worker_that_says_itself_that_it_lost_a_call_counts_as_lost() -> None:
    calls = Counter[str]()

    async def hang(request: bytes, context: BearerCall) -> bytes:
        calls["n"] += 1
        status = call_status(ReplicaLost("the engine hangs", 0.1), "mine")
        await context.abort(status.code, status.message, status.trailing_metadata)

    async with scripted_worker(hang) as address, running_gateway(address) as (_, stubs):
        lost = await failure_of(stubs.generation.Generate(generate("poison")))

    assert (lost.reason, calls["n"]) == ("REPLICAS_LOST", 3)


@pytest.mark.parametrize("says_so", [False, True], ids=["dies", "hangs"])
async def test_a_stream_that_ends_worker_after_worker_once_started_is_given_to_no_other(
    says_so: bool,
) -> None:
    calls = Counter[str]()

    async def die(request: bytes, context: BearerCall) -> AsyncIterator[bytes]:
        calls["n"] += 1
        yield pb.GenerateStreamResponse(sequence_number=1).SerializeToString()
        if says_so:
            status = call_status(ReplicaLost("the engine hangs", 0.1), "mine")
            await context.abort(status.code, status.message, status.trailing_metadata)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    poison = stream("poison", request_id="mine")
    async with (
        scripted_worker(die) as address,
        running_gateway(address) as (_, stubs),
    ):
        ends = [await failure_of(stubs.generation.GenerateStream(poison)) for _ in range(5)]
        other = await failure_of(
            stubs.generation.GenerateStream(stream("poison", request_id="another"))
        )

    assert [one.reason for one in ends] == ["REPLICA_LOST"] * 2 + ["REPLICAS_LOST"] * 3
    assert {one.code for one in ends[2:]} == {grpc.StatusCode.INTERNAL}
    assert {(one.retry_after, one.pushback) for one in ends[2:]} == {(None, None)}
    assert {one.metadata["request_id"] for one in ends} == {"mine"}
    assert (other.reason, calls["n"]) == ("REPLICA_LOST", 4)


async def test_a_worker_is_watched_on_after_an_error_in_what_it_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running_worker(FakeGenerator()) as (worker, address),
        running_gateway() as (gateway, _),
    ):
        publish, failures = gateway.pool._changed, [ZeroDivisionError("a bug")]

        def fail_once() -> None:
            if gateway.pool.num_serving and failures:
                raise failures.pop()
            publish()

        gateway.pool._changed = fail_once
        await gateway.pool.sync([address])

        await until(lambda: not failures)
        await until(lambda: gateway.pool.num_serving == 1)
        await worker.drain(0)
        await until(lambda: gateway.pool.num_serving == 0)

    assert any("has failed; it begins anew" in record.getMessage() for record in caplog.records)


# A worker in a process of its own, killed.


async def test_a_killed_worker_loses_nothing_but_the_streams_it_had_started() -> None:
    survivor = FakeGenerator()
    survivor.release.set()
    config = GatewayConfig(
        worker_wait=60, worker_keepalive_timeout=3600
    )  # its connection tells, no ping
    async with (
        worker_process() as doomed,
        running_worker(survivor) as (_, address),
        running_gateway(doomed.address, config=config) as (gateway, stubs),
    ):
        started = stubs.generation.GenerateStream(stream("HOLD"))
        await started.initial_metadata()
        unary = asyncio.ensure_future(stubs.generation.Generate(generate("HOLD unary")))
        assert {await doomed.next_prompt(), await doomed.next_prompt()} == {"HOLD", "HOLD unary"}
        await gateway.pool.sync([doomed.address, address])
        await until(lambda: gateway.pool.num_serving == 2)

        doomed.kill()
        lost = await failure_of(started)
        answer = await unary
        more = await asyncio.gather(
            *(stubs.generation.Generate(generate(f"n{i}")) for i in range(20))
        )

    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")
    assert lost.retry_after is not None
    assert answer.results[0].sequences[0].text == "HOLD unary "
    assert [r.results[0].sequences[0].text for r in more] == [f"n{i} " for i in range(20)]


async def test_a_stream_that_was_not_started_moves_to_another_worker_unseen() -> None:
    survivor = FakeGenerator()
    async with (
        worker_process() as doomed,
        running_worker(survivor) as (_, address),
        running_gateway(doomed.address) as (gateway, stubs),
    ):
        call = stubs.generation.GenerateStream(stream("WAIT then go"))  # is not admitted there
        assert await doomed.next_prompt() == "WAIT then go"
        await gateway.pool.sync([doomed.address, address])
        await until(lambda: gateway.pool.num_serving == 2)

        doomed.kill()

        text = "".join([message.delta.text async for message in call])

    assert text == "WAIT then go "
    assert len(survivor.requests) == 1


async def test_time_at_a_worker_that_was_lost_is_not_time_of_waiting_for_one(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr("server.gateway.pool.time", SimpleNamespace(monotonic=clock))
    async with (
        worker_process() as doomed,
        running_worker(FakeGenerator()) as (_, address),
        running_gateway(doomed.address) as (gateway, stubs),
    ):
        call = asyncio.ensure_future(stubs.generation.Generate(generate("WAIT then go")))
        assert await doomed.next_prompt() == "WAIT then go"
        wait, is_waiting = gateway.pool._wait, asyncio.Event()

        async def note(*attempts: Any, **how: Any) -> None:
            is_waiting.set()
            await wait(*attempts, **how)

        monkeypatch.setattr(gateway.pool, "_wait", note)
        clock.now += 3600

        doomed.kill()
        await is_waiting.wait()
        await until(lambda: gateway.pool.num_serving == 0)
        await gateway.pool.sync([address])

        assert (await call).results[0].sequences[0].text == "WAIT then go "


async def test_a_worker_that_comes_back_is_used_again() -> None:
    async with running_gateway() as (gateway, stubs):
        async with running_worker(FakeGenerator()) as (_, first):
            await gateway.pool.sync([first])
            await stubs.generation.Generate(generate("a"))
        waiting = asyncio.ensure_future(stubs.generation.Generate(generate("b")))
        async with running_worker(FakeGenerator()) as (_, second):
            await gateway.pool.sync([second])

            assert (await waiting).results[0].sequences[0].text == "b "


async def test_a_closed_gateway_leaves_no_thread_and_no_task_of_its_workers() -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        async with running_gateway(address) as (gateway, _):
            await until(lambda: gateway.pool.num_serving == 1)

        def left() -> list[str]:
            names = [task.get_name() for task in asyncio.all_tasks()]
            names += [thread.name for thread in threading.enumerate()]
            return [name for name in names if address in name]

        await until(lambda: not left())


async def test_workers_may_come_while_another_thread_counts_those_that_serve(cell: Cell) -> None:
    pool = cell.gateway.pool
    coming = SimpleNamespace(serving=True)

    class Looked(SimpleNamespace):
        @property
        def serving(self) -> bool:
            pool._backends.setdefault("late", cast(Backend, coming))
            return True

    pool._backends["looked at"] = cast(Backend, Looked())
    try:
        assert cell.gateway.pool.num_serving == 3
        assert cell.gateway.pool.num_serving == 4
    finally:
        del pool._backends["looked at"], pool._backends["late"]
