"""Calls to a worker: what it sends goes to the client in order, no faster than that takes it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from server.call_server import ServerCall
from server.gateway.worker_calls import WorkerCalls
from server.gateway.worker_channel import WorkerChannel
from server.wire.worker_call import WorkerCall, WorkerFailed
from tests.server.calls import until


class Client:
    """The call of a client, which takes a message when the test lets it."""

    def __init__(self, *, takes: bool = True) -> None:
        self.passed: list[Any] = []
        self.ends: list[tuple[bytes | None, Any]] = []  # with the last message, if it came so
        self.takes = takes
        self.is_there = True
        self.has_come = threading.Semaphore(0)
        self._waiting: list[Callable[[bool], object]] = []

    def pass_metadata(self, metadata: Any, passed: Callable[[bool], object]) -> None:
        self.pass_message(dict(metadata), passed)

    def pass_message(
        self, message: Any, passed: Callable[[bool], object], *, is_followed: bool = False
    ) -> None:
        self.passed.append(message)
        self._waiting.append(passed)
        if self.takes:
            self.take()
        self.has_come.release()

    def pass_end(self, message: bytes | None, trailing_metadata: Any) -> bool:
        self.ends.append((message, trailing_metadata))
        if message is not None:
            self.passed.append(message)
        return self.is_there

    def take(self) -> None:
        self._waiting.pop()(self.is_there)


class Answering(grpc.GenericRpcHandler):
    """A worker that knows "/numbers", "/endless" and "/failing"."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = {"/numbers": self._numbers, "/endless": self._endless, "/failing": self._failing}
        return grpc.unary_stream_rpc_method_handler(found[details.method])

    async def _numbers(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata((("replica", "1"),))
        for number in range(int(request)):
            yield b"%d" % number
        context.set_trailing_metadata((("behind", "all"),))

    async def _endless(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def _failing(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("why", "it is"),))


@pytest.fixture
async def worker() -> AsyncIterator[Answering]:
    worker = Answering()
    yield worker


@pytest.fixture
async def address(worker: Answering) -> AsyncIterator[str]:
    server = aio.server()
    server.add_generic_rpc_handlers((worker,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def calls(address: str) -> AsyncIterator[WorkerCalls]:
    calls = WorkerCalls(address, ())
    yield calls
    calls.close()


def start(calls: WorkerCalls, method: str, client: Client, request: bytes = b"") -> WorkerCall:
    return calls.start(method, request, (), 600.0, cast(ServerCall, client))


async def test_an_answer_goes_to_the_client_in_order(calls: WorkerCalls) -> None:
    client = Client()

    trailing = await start(calls, "/numbers", client, b"100").end()

    assert client.passed == [{"replica": "1"}, *(b"%d" % number for number in range(100))]
    assert ("behind", "all") in trailing


async def test_a_message_waits_until_the_one_before_has_gone(calls: WorkerCalls) -> None:
    client = Client(takes=False)

    call = start(calls, "/numbers", client, b"2")
    for num_passed in (1, 2):
        assert await asyncio.to_thread(client.has_come.acquire, timeout=60)
        await asyncio.sleep(0.02)
        assert len(client.passed) == num_passed
        assert not client.has_come.acquire(blocking=False)
        client.takes = num_passed == 2  # the last one may come with the end
        client.take()

    await call.end()
    assert client.passed[1:] == [b"0", b"1"]


async def test_the_next_message_is_there_when_the_one_before_has_gone(calls: WorkerCalls) -> None:
    client = Client(takes=False)

    call = start(calls, "/numbers", client, b"2")
    await until(lambda: call._waiting)
    assert client.passed == [{"replica": "1"}]

    client.take()  # in this thread: nothing has to come any more
    assert client.passed == [{"replica": "1"}, b"0"]
    await until(lambda: call._waiting)
    client.takes = True
    client.take()
    await call.end()
    assert client.passed[1:] == [b"0", b"1"]


async def test_a_failure_comes_behind_what_was_sent_before_it(calls: WorkerCalls) -> None:
    client = Client()

    call = start(calls, "/failing", client)
    with pytest.raises(WorkerFailed) as failed:
        await call.end()

    assert client.passed == [b"begun"] and call.is_committed
    assert failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.details == "full"
    assert ("why", "it is") in failed.value.trailing_metadata


async def test_a_client_that_is_gone_ends_the_call(calls: WorkerCalls) -> None:
    client = Client()
    client.is_there = False

    call = start(calls, "/numbers", client, b"100")
    with pytest.raises(aio.InternalError):
        await call.end()

    assert len(client.passed) == 1


async def test_a_call_that_is_cancelled_ends_at_the_worker(
    calls: WorkerCalls, worker: Answering
) -> None:
    call = start(calls, "/endless", Client())
    ended = asyncio.ensure_future(call.end())
    while not call.is_committed:
        await asyncio.sleep(0.01)

    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ended
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_closing_ends_the_calls_and_the_thread(worker: Answering, address: str) -> None:
    calls = WorkerCalls(address, ())
    call = start(calls, "/endless", Client())
    while not call.is_committed:
        await asyncio.sleep(0.01)
    (thread,) = [t for t in threading.enumerate() if t.name == f"calls to {address}"]

    calls.close()

    await asyncio.wait_for(worker.cancelled.wait(), 60)
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_a_client_that_fails_ends_the_call(calls: WorkerCalls) -> None:
    class Failing(Client):
        def pass_message(self, message: Any, *rest: Any, **how: Any) -> None:
            raise ZeroDivisionError("a bug")

    call = start(calls, "/numbers", Failing(), b"100")
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(call.end(), 60)


async def test_stubs_follow_a_stream_on_a_connection_of_calls(calls: WorkerCalls) -> None:
    follow = WorkerChannel(calls).unary_stream("/numbers", bytes, int)

    assert [number async for number in follow(b"100")] == [*range(100)]


async def test_stubs_are_told_how_a_stream_fails(calls: WorkerCalls) -> None:
    follow = WorkerChannel(calls).unary_stream("/failing", bytes, bytes)
    came = []

    with pytest.raises(WorkerFailed) as failed:
        async for message in follow(b""):
            came.append(message)

    assert came == [b"begun"] and failed.value.details == "full"


async def test_a_stream_that_a_stub_leaves_ends_at_the_worker(
    calls: WorkerCalls, worker: Answering
) -> None:
    messages = WorkerChannel(calls).unary_stream("/endless", bytes, bytes)(b"")

    async with aclosing(cast(AsyncGenerator[bytes, None], messages)):
        await anext(messages)

    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_a_stream_that_a_stub_leaves_as_it_fails_troubles_nobody(calls: WorkerCalls) -> None:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    follow = WorkerChannel(calls).unary_stream("/failing", bytes, bytes)

    async with aclosing(cast(AsyncGenerator[bytes, None], follow(b""))) as messages:
        await anext(messages)
        with pytest.raises(WorkerFailed):  # behind it, on the same connection
            [message async for message in follow(b"")]
    gc.collect()

    assert not [one for one in troubles if "never retrieved" in one["message"]]
