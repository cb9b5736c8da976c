"""Lanes: many calls in one of gRPC, between the connection of a gateway and a worker's server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest
from grpc import aio

from server.call_server import CallServer, ServerCall
from server.gateway.worker_calls import WorkerCalls
from server.lane import (
    MAX_REQUEST_BYTES,
    METHOD,
    NUM_UNHEARD,
    NUM_UNTAKEN,
    ToWorker,
    metadata_of,
    pairs_of,
)
from server.wire.worker_call import WorkerCall, WorkerFailed
from server.worker.lane import Lane, LaneCall
from tests.server.calls import until

Behavior = Callable[[LaneCall], Coroutine[Any, Any, None]]


class Client:
    """The call of a client, which takes a message when the test lets it."""

    def __init__(self, *, takes: bool = True) -> None:
        self.passed: list[Any] = []
        self.ends: list[tuple[bytes | None, Any]] = []  # with the last message, if it came so
        self.takes = takes
        self.followed: list[bytes] = []  # at once by another one
        self.is_there = self.is_there_at_the_end = True
        self._waiting: list[Callable[[bool], object]] = []

    def pass_metadata(self, metadata: Any, passed: Callable[[bool], object]) -> None:
        self.pass_message(dict(metadata), passed)

    def pass_message(
        self, message: Any, passed: Callable[[bool], object], *, is_followed: bool = False
    ) -> None:
        self.passed.append(message)
        if is_followed:
            self.followed.append(message)
        self._waiting.append(passed)
        if self.takes:
            self.take()

    def pass_end(self, message: bytes | None, trailing_metadata: Any) -> bool:
        self.ends.append((message, trailing_metadata))
        if message is not None:
            self.passed.append(message)
        return self.is_there_at_the_end

    def take(self) -> None:
        self._waiting.pop()(self.is_there)


class Answering:
    """A worker whose calls of a lane are answered by a function of the test."""

    def __init__(self) -> None:
        self.behavior: Behavior | None = None
        self.own: list[str] = []  # methods that came outside of a lane
        self.lanes: list[Lane] = []
        self.lane_class = Lane
        self.cancelled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.server = CallServer(self._arrived, ())
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _arrived(self, call: ServerCall) -> None:
        self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: ServerCall) -> None:
        if call.method != METHOD:
            self.own.append(call.method)
            call.answer(call.finish(b"by itself"))
            return
        self.lanes.append(self.lane_class(call, self._answer))
        call.answer(self.lanes[-1].carry())

    async def _answer(self, call: LaneCall) -> None:
        assert self.behavior is not None
        try:
            await self.behavior(call)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
async def worker() -> AsyncIterator[Answering]:
    worker = Answering()
    yield worker
    await worker.server.stop(0)


@pytest.fixture
async def calls(worker: Answering) -> AsyncIterator[WorkerCalls]:
    """A connection with a lane that is open."""
    calls = WorkerCalls(worker.address, ())
    await calls.start("/first", b"", (), 600.0, Client()).end()
    await until(lambda: calls._lane is not None and calls._lane.is_open)
    worker.own.clear()
    yield calls
    calls.close()


def start(calls: WorkerCalls, client: Client | None, request: bytes = b"") -> WorkerCall:
    return calls.start("/method", request, (("key", "value"),), 600.0, client)


async def counting(call: LaneCall) -> None:
    await call.send_initial_metadata((("replica", "1"), ("some-bin", b"\xff")))
    for number in range(int(await call.read())):
        await call.write(b"%d" % number)
    call.set_trailing_metadata((("behind", "all"),))
    await call.finish()


async def endless(call: LaneCall) -> None:
    await call.write(b"begun")
    await asyncio.Event().wait()


async def test_the_answers_of_many_calls_come_whole_and_in_order(
    calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = counting
    clients = [Client() for _ in range(20)]

    ends = [start(calls, client, b"%d" % n).end() for n, client in enumerate(clients)]
    trailing = await asyncio.gather(*ends)

    for n, client in enumerate(clients):
        metadata = {"replica": "1", "some-bin": b"\xff"}
        assert client.passed == [metadata, *(b"%d" % number for number in range(n))]
    assert set(trailing) == {(("behind", "all"),)}
    assert worker.own == [] and len(worker.lanes) == 1


async def test_what_a_worker_says_at_once_goes_as_few_parts_the_end_with_the_last_message(
    calls: WorkerCalls, worker: Answering
) -> None:
    async def say(call: LaneCall) -> None:
        for message in (b"one", b"two", b"three"):
            await call.write(message)
        call.set_trailing_metadata((("behind", "all"),))
        await call.finish()

    worker.behavior = say
    client = Client()

    await start(calls, client).end()

    assert client.followed == [b"one", b"two"]
    assert client.passed == [b"one", b"two", b"three"]
    assert client.ends == [(b"three", (("behind", "all"),))]


async def test_a_client_that_is_gone_at_the_end_is_told_of(
    calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = counting
    client = Client()
    client.is_there_at_the_end = False

    with pytest.raises(aio.InternalError):
        await start(calls, client, b"2").end()


async def test_what_is_asked_comes_to_the_worker(calls: WorkerCalls, worker: Answering) -> None:
    seen: list[Any] = []

    async def note(call: LaneCall) -> None:
        seen.append((call.method, await call.read(), await call.read()))
        seen.append((call.invocation_metadata(), call.time_remaining()))
        await call.finish()

    worker.behavior = note
    await start(calls, Client(), b"request").end()
    await calls.start("/method", b"", (), None, Client()).end()

    assert seen[0] == ("/method", b"request", aio.EOF)
    assert seen[1][0] == (("key", "value"),) and 500 < seen[1][1] <= 600
    assert seen[3] == ((), None)


@pytest.mark.parametrize("what", ["a large request", "an answer of one message"])
async def test_other_calls_have_a_call_of_their_own(
    what: str, calls: WorkerCalls, worker: Answering
) -> None:
    if what == "a large request":
        call = start(calls, Client(), bytes(MAX_REQUEST_BYTES + 1))
    else:
        call = start(calls, None)

    await call.end()

    assert worker.own == ["/method"]
    assert what == "a large request" or call.response == b"by itself"


async def test_a_worker_that_begins_to_answer_as_another_has_no_lane(worker: Answering) -> None:
    class Another(Lane):
        async def carry(self) -> None:
            await self._call.send_initial_metadata(())
            await asyncio.Event().wait()

    worker.lane_class = Another
    calls = WorkerCalls(worker.address, ())
    for _ in range(3):
        await start(calls, Client()).end()
        await until(lambda: worker.lanes)
        await asyncio.sleep(0.05)

    assert worker.own == ["/method"] * 3
    calls.close()


async def test_a_client_that_does_not_read_stops_its_own_stream_only(
    calls: WorkerCalls, worker: Answering
) -> None:
    said: dict[str, int] = {}

    async def say(call: LaneCall) -> None:
        name = (await call.read()).decode()
        for number in range(100):
            await call.write(b"%d" % number)
            said[name] = number + 1
        await call.finish()

    worker.behavior = say
    slow, quick = Client(takes=False), Client()
    waiting = start(calls, slow, b"slow")
    await until(lambda: said.get("slow") == NUM_UNTAKEN)
    await start(calls, quick, b"quick").end()
    said_meanwhile = said["slow"]
    slow.takes = True
    slow.take()
    await waiting.end()

    assert said_meanwhile == NUM_UNTAKEN
    assert quick.passed == slow.passed == [b"%d" % number for number in range(100)]


async def test_long_messages_count_for_several(calls: WorkerCalls, worker: Answering) -> None:
    num_said = 0
    message = bytes(NUM_UNTAKEN << 13)

    async def say(call: LaneCall) -> None:
        nonlocal num_said
        for _ in range(5):
            await call.write(message)
            num_said += 1
        await call.finish()

    worker.behavior = say
    client = Client(takes=False)
    call = start(calls, client)
    await until(lambda: num_said == 2)  # the first is passed on, the next one waits behind it
    await asyncio.sleep(0.05)
    said_meanwhile = num_said
    client.takes = True
    client.take()
    await call.end()

    assert said_meanwhile == 2
    assert client.passed == [message] * 5


async def test_what_is_asked_at_once_is_sent_in_messages_that_a_worker_takes(
    calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = counting
    metadata = tuple((f"key-{i}", "v" * 1000) for i in range(8))

    ends = [calls.start("/method", b"1", metadata, 600.0, Client()).end() for _ in range(1000)]
    await asyncio.gather(*ends)

    assert worker.own == [] and len(worker.lanes) == 1


async def test_a_call_that_is_cancelled_before_it_is_sent_is_never_asked(
    calls: WorkerCalls, worker: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    take = worker.lanes[0]._take

    def note(data: bytes) -> None:
        asked.extend(one.request for one in ToWorker.FromString(data).asked)
        take(data)

    monkeypatch.setattr(worker.lanes[0], "_take", note)
    worker.behavior = counting
    assert calls._lane is not None
    calls._lane._is_sending = True  # an earlier request
    start(calls, Client(), b"1").cancel()
    calls._lane._is_sending = False
    await start(calls, Client(), b"2").end()

    assert asked == [b"2"]


async def test_a_gateway_that_is_busy_is_sent_no_more_than_it_looks_at(
    calls: WorkerCalls, worker: Answering
) -> None:
    num_said = 0
    is_free = threading.Event()

    class Busy(Client):
        def pass_message(self, message: Any, *rest: Any, **how: Any) -> None:
            is_free.wait(60)
            super().pass_message(message, *rest, **how)

    async def say(call: LaneCall) -> None:
        nonlocal num_said
        for _ in range(NUM_UNTAKEN - 1):
            await call.write(b"some")
            num_said += 1
        await call.finish()

    worker.behavior = say
    num_calls = 2 * NUM_UNHEARD // NUM_UNTAKEN
    ends = [start(calls, Busy()).end() for _ in range(num_calls)]
    await until(lambda: num_said >= NUM_UNHEARD)
    await asyncio.sleep(0.05)
    said_meanwhile = num_said
    is_free.set()
    await asyncio.gather(*ends)

    assert NUM_UNHEARD <= said_meanwhile < NUM_UNHEARD + num_calls
    assert num_said == num_calls * (NUM_UNTAKEN - 1)


async def test_a_failure_comes_behind_what_was_sent_before_it(
    calls: WorkerCalls, worker: Answering
) -> None:
    async def fail(call: LaneCall) -> None:
        await call.write(b"begun")
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("why-bin", b"\x00"),))

    worker.behavior = fail
    client = Client()
    with pytest.raises(WorkerFailed) as failed:
        await start(calls, client).end()

    assert client.passed == [b"begun"]
    assert failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.details == "full"
    assert failed.value.trailing_metadata == (("why-bin", b"\x00"),)


async def test_a_fault_of_one_call_ends_that_call_only(
    calls: WorkerCalls, worker: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(call: LaneCall) -> None:
        if await call.read() == b"wrong":
            raise ValueError("unforeseen")
        await call.finish()

    worker.behavior = fail
    with pytest.raises(WorkerFailed) as failed:
        await start(calls, Client(), b"wrong").end()
    await start(calls, Client(), b"right").end()

    assert failed.value.code is grpc.StatusCode.UNKNOWN
    assert "unforeseen" in caplog.text


async def test_a_client_that_fails_ends_its_call_only(
    calls: WorkerCalls, worker: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Client):
        def pass_message(self, message: Any, *rest: Any, **how: Any) -> None:
            raise ZeroDivisionError("a bug")

    worker.behavior = counting
    client = Client()
    wrong, right = start(calls, Failing(), b"3"), start(calls, client, b"3")

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(wrong.end(), 60)
    await asyncio.wait_for(right.end(), 60)

    assert client.passed[1:] == [b"0", b"1", b"2"]
    assert "was not passed on" in caplog.text


@pytest.mark.parametrize("how", ["cancelled", "its client is gone", "the connection is closed"])
async def test_a_call_that_nobody_hears_ends_at_the_worker(
    how: str, calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = endless
    client = Client()
    client.is_there = how != "its client is gone"
    call = start(calls, client)
    await until(lambda: call.is_committed)

    if how == "the connection is closed":
        calls.close()
        with pytest.raises(WorkerFailed):
            await call.end()
    elif how == "cancelled":
        call.cancel()
    else:
        with pytest.raises(aio.InternalError):
            await call.end()
        call.cancel()

    await asyncio.wait_for(worker.cancelled.wait(), 60)


@pytest.mark.filterwarnings("error")
async def test_a_call_that_is_cancelled_as_it_comes_is_not_answered(
    calls: WorkerCalls, worker: Answering
) -> None:
    answered: list[bytes] = []

    async def note(call: LaneCall) -> None:
        answered.append(await call.read())
        await call.finish()

    worker.behavior = note
    asked = {"number": 1000, "method": "/method", "request": b"nobody's"}
    worker.lanes[0]._take(ToWorker(asked=[asked], cancelled=[1000]).SerializeToString())
    await start(calls, Client(), b"somebody's").end()
    gc.collect()

    assert answered == [b"somebody's"]


async def test_a_lane_that_closes_ends_its_calls_as_a_worker_that_stops(
    calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = endless
    client = Client()
    call = start(calls, client)
    await until(lambda: call.is_committed)

    worker.lanes[0].close()
    with pytest.raises(WorkerFailed) as failed:
        await call.end()

    assert failed.value.code is grpc.StatusCode.UNAVAILABLE
    assert any(key == "grpc-status-details-bin" for key, _ in failed.value.trailing_metadata)
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_a_lane_that_is_lost_ends_its_calls_and_is_asked_for_again(
    calls: WorkerCalls, worker: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.worker_calls._LANE_PAUSE", 0.0)
    worker.behavior = endless
    call = start(calls, Client())
    await until(lambda: call.is_committed)

    worker.lanes[0]._call._call.cancel()
    with pytest.raises(WorkerFailed):
        await call.end()
    worker.behavior = counting
    await start(calls, Client()).end()
    await until(lambda: calls._lane is not None and calls._lane.is_open)
    client = Client()
    await start(calls, client, b"1").end()

    assert client.passed[1:] == [b"0"]
    assert worker.own == ["/method"] and len(worker.lanes) == 2


async def test_what_is_no_message_ends_the_lane(
    calls: WorkerCalls, worker: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    worker.behavior = endless
    call = start(calls, Client())
    await until(lambda: call.is_committed)

    worker.lanes[0]._take(b"\xff")

    with pytest.raises(WorkerFailed):
        await call.end()
    assert "lane" in caplog.text


async def test_what_is_no_message_of_a_worker_ends_the_lane(
    calls: WorkerCalls, worker: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    async def corrupt(call: LaneCall) -> None:
        await call._lane._call.write(b"\xff")
        await asyncio.Event().wait()

    worker.behavior = corrupt

    with pytest.raises(WorkerFailed) as failed:
        await asyncio.wait_for(start(calls, Client()).end(), 60)

    assert failed.value.code is grpc.StatusCode.UNAVAILABLE
    assert "no message of a lane" in caplog.text


async def test_what_comes_behind_the_end_of_a_lane_is_not_answered(
    calls: WorkerCalls, worker: Answering
) -> None:
    answered: list[bytes] = []

    async def note(call: LaneCall) -> None:
        answered.append(await call.read())

    worker.behavior = note
    lane = worker.lanes[0]
    calls.close()  # its gateway has gone
    await until(lambda: lane._is_closed)
    lane._take(ToWorker(asked=[{"number": 1, "method": "/method"}]).SerializeToString())
    await asyncio.sleep(0.05)

    assert answered == []


async def test_a_connection_whose_calls_end_at_once_is_closed(
    calls: WorkerCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_alone = calls.start_alone

    def late(*arguments: Any) -> WorkerCall:
        time.sleep(0.2)  # in which the thread would find nothing open any more
        return start_alone(*arguments)

    monkeypatch.setattr(calls, "start_alone", late)

    calls.close()

    await until(lambda: not calls._open)


async def test_a_lane_carries_more_calls_than_32_bits_count(
    calls: WorkerCalls, worker: Answering
) -> None:
    worker.behavior = counting
    assert calls._lane is not None
    calls._lane._numbers = itertools.count(2**32 - 1)
    client = Client(takes=False)
    held = start(calls, client, b"100")
    await start(calls, Client(), b"100").end()
    client.takes = True
    client.take()
    await held.end()

    assert len(client.passed) == 101


def test_metadata_is_the_same_behind_the_wire() -> None:
    metadata = (("key", "value"), ("some-bin", b"\x00\xff"))

    assert metadata_of(pairs_of(metadata)) == metadata
