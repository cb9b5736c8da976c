"""How calls end that have run out of time, or whose client is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from engine.errors import EngineFailure, ExpiredInDecode
from server.calls.deadlines import abort, in_time
from server.calls.status import call_status
from tests.fakes.calls import Stubs, failure, generate, stream, stubs_for
from tests.fakes.engines import FakeGenerator, running_worker
from tests.fakes.gateways import running_cell
from tests.fakes.processes import worker_process

GONE = cast(Any, aio.InternalError)("Failed grpc_call_start_batch")


class FakeContext:
    """A call with so much time left, whose client is gone."""

    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining

    async def abort(self, *status: object) -> None:
        raise GONE


def context(remaining: float | None = None) -> aio.ServicerContext[Any, Any]:
    return cast(Any, FakeContext(remaining))


async def test_a_call_ends_before_its_deadline() -> None:
    begun = time.monotonic()

    with pytest.raises(ExpiredInDecode, match="the deadline passed"):
        async with (
            in_time(context(remaining=1.0), margin=0.9),
            asyncio.timeout(60),
        ):
            await asyncio.Event().wait()

    assert time.monotonic() - begun >= 0.9  # a short time is not cut to nothing


async def test_a_call_without_a_deadline_is_left_alone() -> None:
    async with in_time(context(), margin=0.9):
        await asyncio.sleep(0)


async def test_who_is_cancelled_at_the_deadline_by_somebody_else_too_is_cancelled() -> None:
    async def wait() -> None:
        async with in_time(context(remaining=0.01), margin=0.0):
            try:
                await asyncio.Event().wait()
            finally:
                task.cancel()

    task = asyncio.create_task(wait())

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_of_something_else_is_no_expired_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with in_time(context(remaining=60.0), margin=0.1):
            raise TimeoutError


async def test_where_nothing_can_be_sent_any_more_a_call_ends_as_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError):
        async with in_time(context(), margin=0.1):
            raise GONE
    with pytest.raises(asyncio.CancelledError):
        await abort(context(), call_status(EngineFailure("too late"), "r"))


@asynccontextmanager
async def worker_alone(engine: FakeGenerator) -> AsyncIterator[Stubs]:
    async with running_worker(engine) as (_, address), stubs_for(address) as stubs:
        yield stubs


@asynccontextmanager
async def behind_gateway(engine: FakeGenerator) -> AsyncIterator[Stubs]:
    async with running_cell(engine) as cell:
        yield cell.stubs


@pytest.mark.parametrize("serve", [worker_alone, behind_gateway])
async def test_a_call_whose_engine_does_not_end_it_expires_with_details(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client waits for a long time yet when the call ends half a second after its start.
    monkeypatch.setattr("server.calls.deadlines._MARGIN_SHARE", 0.99)
    monkeypatch.setattr("server.local_services._DEADLINE_MARGIN", 60.0)
    monkeypatch.setattr("server.worker.generation.engine_deadline", lambda context: None)
    engine = FakeGenerator()
    async with serve(engine) as stubs:
        with pytest.raises(aio.AioRpcError) as unary:
            await stubs.generation.Generate(generate("HOLD"), timeout=50)
        with pytest.raises(aio.AioRpcError) as streamed:
            async for _ in stubs.generation.GenerateStream(stream("HOLD"), timeout=50):
                pass

    for caught in (unary, streamed):
        expired = failure(caught.value)
        assert expired.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert expired.reason == "EXPIRED_IN_DECODE"
    assert len(engine.aborted) == 2


def of_a_call(record: logging.LogRecord) -> bool:
    """An error of a call here; late events of an earlier test come with its closed loop."""
    error = record.exc_info[1] if record.exc_info else None
    foreign = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return record.levelno >= logging.ERROR and not foreign


async def test_streams_that_expire_in_mid_write_leave_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with behind_gateway(FakeGenerator()) as stubs:

        async def expire(i: int) -> grpc.StatusCode:
            try:
                async for _ in stubs.generation.GenerateStream(stream("HUGE"), timeout=i / 500):
                    pass
            except aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        codes = await asyncio.gather(*(expire(1 + i) for i in range(100)))

    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert [r.getMessage() for r in caplog.records if of_a_call(r)] == []


async def test_every_call_of_a_burst_that_expires_ends_as_expired() -> None:
    async def expire(call: Awaitable[object]) -> grpc.StatusCode:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        code: grpc.StatusCode = caught.value.code()
        return code

    async with worker_process() as worker, stubs_for(worker.address) as stubs:
        calls = [
            expire(stubs.generation.Generate(generate("HOLD"), timeout=0.02 + i / 2_500))
            for i in range(1_000)
        ]
        codes = Counter(await asyncio.gather(*calls))

    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED: 1_000}
