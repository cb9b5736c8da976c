"""Workers that neither answer nor go away: what a gateway does with their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from server.config import GatewayConfig
from server.gateway.backend import Backend
from server.gateway.gateway import Gateway
from server.wire.worker_call import WorkerFailed
from tests.fakes.calls import Stubs, failure_of, generate, stream, until
from tests.fakes.engines import FakeGenerator, running_worker
from tests.fakes.gateways import running_gateway
from tests.fakes.processes import Process, worker_process

SILENCE = GatewayConfig(worker_wait=60, worker_keepalive_timeout=0.5)


@dataclass
class Calls:
    """A call of every kind, all at a worker that is about to hang."""

    started: aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]
    waiting: aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]
    unary: asyncio.Future[pb.GenerateResponse]


@dataclass
class Doomed:
    """A gateway before a worker that is about to hang and one that is well."""

    doomed: Process
    survivor: FakeGenerator
    survivor_address: str
    gateway: Gateway
    stubs: Stubs
    lost: list[str]  # addresses of workers that were found to hang

    async def ask(self, *, block: bool = False) -> Calls:
        started = self.stubs.generation.GenerateStream(stream("HOLD"))
        await started.initial_metadata()
        waiting = self.stubs.generation.GenerateStream(stream("WAIT stream"))
        unary = asyncio.ensure_future(self.stubs.generation.Generate(generate("HOLD unary")))
        prompts = {await self.doomed.next_prompt() for _ in range(3)}
        assert prompts == {"HOLD", "WAIT stream", "HOLD unary"}
        if block:  # the event loop; gRPC itself goes on to answer pings
            self.blocked = asyncio.ensure_future(self.stubs.generation.Generate(generate("BLOCK")))
            assert await self.doomed.next_prompt() == "BLOCK"
        await self.gateway.pool.sync([self.doomed.address, self.survivor_address])
        await until(lambda: self.gateway.pool.num_serving == 2)
        return Calls(started, waiting, unary)


@asynccontextmanager
async def cell(config: GatewayConfig = SILENCE) -> AsyncIterator[Doomed]:
    survivor = FakeGenerator()
    survivor.release.set()
    lost: list[str] = []

    async def remember(address: str) -> None:
        lost.append(address)

    async with (
        worker_process() as doomed,
        running_worker(survivor) as (_, address),
        running_gateway(doomed.address, config=config, lost=remember) as (gateway, stubs),
    ):
        yield Doomed(doomed, survivor, address, gateway, stubs, lost)


async def assert_moved_or_lost(calls: Calls) -> None:
    async with asyncio.timeout(60):
        text = "".join([message.delta.text async for message in calls.waiting])
        answer = await calls.unary
        lost = await failure_of(calls.started)

    assert text == "WAIT stream "
    assert answer.results[0].sequences[0].text == "HOLD unary "
    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")


async def test_a_worker_that_has_left_before_this_is_heard_is_not_taken_for_one_that_hangs() -> (
    None
):
    engine = FakeGenerator()
    async with running_worker(engine) as (worker, address), running_gateway(address) as (gw, stubs):
        call = asyncio.ensure_future(failure_of(stubs.generation.GenerateStream(stream("HOLD"))))
        await engine.seen.wait()
        (backend,) = gw.pool.backends

        worker.leave()
        await until(lambda: gw.pool.num_serving == 0)
        assert not call.done()
        await worker.drain(0)  # its process may be gone then
        await call
        with pytest.raises(WorkerFailed) as failed:
            while True:  # until it has tried to connect again
                await _ask(backend)
        assert not failed.value.is_workers_own

        assert await backend.retire()


async def _ask(backend: Backend) -> None:
    """Ask a worker whether it is there; fail if nothing has come of it."""
    try:
        check, answer = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse
        await backend.ask("/grpc.health.v1.Health/Check", check, answer, 60)
    except WorkerFailed as error:
        if not error.is_workers_own:
            raise
        await asyncio.sleep(0.01)


async def test_calls_of_a_stopped_worker_move_or_end() -> None:
    async with cell() as here:
        calls = await here.ask()

        here.doomed.stop()

        await assert_moved_or_lost(calls)


@pytest.mark.long
async def test_a_stopped_worker_holds_calls_for_10_seconds_and_started_ones_for_15() -> None:
    async with cell(GatewayConfig()) as here:
        calls = await here.ask()
        started = asyncio.create_task(failure_of(calls.started))

        here.doomed.stop()

        async with asyncio.timeout(15):
            async with asyncio.timeout(10):
                text = "".join([message.delta.text async for message in calls.waiting])
                answer = await calls.unary
            lost = await started
    assert (text, answer.results[0].sequences[0].text) == ("WAIT stream ", "HOLD unary ")
    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")


async def test_calls_of_a_dropped_worker_that_does_not_answer_move_or_end() -> None:
    async with cell() as here:
        calls = await here.ask(block=True)

        await here.gateway.pool.sync([here.survivor_address])

        await assert_moved_or_lost(calls)
        assert here.lost == [here.doomed.address]


async def test_a_dropped_worker_that_answers_keeps_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = GatewayConfig(worker_wait=60, worker_keepalive_timeout=60)
    answers, ask = list[bool](), Backend._answers

    async def note(backend: Backend) -> bool:
        backend._silence = patient.worker_keepalive_timeout  # for its answer
        answers.append(await ask(backend))
        backend._silence = 0.1  # until the next question
        return answers[-1]

    monkeypatch.setattr(Backend, "_answers", note)
    async with cell(patient) as here:
        calls = await here.ask()

        await here.gateway.pool.sync([here.survivor_address])

        await until(lambda: len(answers) == 3)
        assert answers == [True] * 3
        assert not calls.unary.done()
        assert (here.survivor.requests, here.lost) == ([], [])


async def test_an_idle_worker_that_hangs_is_told_of_when_it_is_dropped() -> None:
    async with cell() as here:
        await until(lambda: here.gateway.pool.num_serving == 1)
        here.doomed.stop()

        await here.gateway.pool.sync([])

        await until(lambda: here.lost == [here.doomed.address])
