"""The wire: all calls in one of gRPC, between the connection of a gateway and a worker's server."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio
from tokenweir.v1 import admin_service_pb2

from server.calls import grpc_core as core
from server.wire import protocol
from server.wire.bearer import Bearer, BearerCall
from server.wire.carrier import Connection
from server.wire.protocol import CHUNK, METHOD, NUM_UNHEARD, NUM_UNTAKEN, metadata_of, pairs_of
from server.wire.work_pb2 import FromWorker, Hello, State, ToWorker
from server.wire.worker_call import WorkerCall, WorkerFailed
from server.wire.worker_log import log_of_worker
from tests.fakes.calls import generate, until
from tests.fakes.gateways import running_gateway
from tests.fakes.wired_worker import WiredWorker

LONG = bytes(range(256)) * 4096 + b"end"  # a MiB, and a little


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


class Busy(Client):
    """It holds up the thread of the connection until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy, self.is_free = threading.Event(), threading.Event()

    def pass_message(self, message: Any, *rest: Any, **how: Any) -> None:
        self.is_busy.set()
        self.is_free.wait(60)
        super().pass_message(message, *rest, **how)


@pytest.fixture
async def worker() -> AsyncIterator[WiredWorker]:
    worker = WiredWorker()
    yield worker
    await worker.server.stop(0)


@pytest.fixture
async def calls(worker: WiredWorker) -> AsyncIterator[Connection]:
    """A connection that carries calls."""
    connection = Connection(worker.address, ())
    connection.carry(60.0)
    yield connection
    connection.close()


@asynccontextmanager
async def raw_gateway(worker: WiredWorker) -> AsyncIterator[aio.StreamStreamCall[bytes, bytes]]:
    """Say to a worker whatever a test wants, in bytes."""
    async with aio.insecure_channel(worker.address) as channel:
        yield channel.stream_stream(METHOD)()


@asynccontextmanager
async def raw_worker(say: Callable[..., AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """Say to a gateway whatever a test wants, in bytes."""
    server = aio.server()
    handler = grpc.stream_stream_rpc_method_handler(say)
    service, _, name = METHOD[1:].partition("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


def start(calls: Connection, client: Client | None, request: bytes = b"") -> WorkerCall:
    return calls.carrier.start("/method", request, (("key", "value"),), 600.0, client)


async def counting(call: BearerCall) -> None:
    await call.send_initial_metadata((("replica", "1"), ("some-bin", b"\xff")))
    for number in range(int(await call.read())):
        await call.write(b"%d" % number)
    call.set_trailing_metadata((("behind", "all"),))
    await call.finish()


async def endless(call: BearerCall) -> None:
    await call.write(b"begun")
    await asyncio.Event().wait()


async def test_the_answers_of_many_calls_come_whole_and_in_order(
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = counting
    clients = [Client() for _ in range(20)]

    ends = [start(calls, client, b"%d" % n).end() for n, client in enumerate(clients)]
    trailing = await asyncio.gather(*ends)

    for n, client in enumerate(clients):
        metadata = {"replica": "1", "some-bin": b"\xff"}
        assert client.passed == [metadata, *(b"%d" % number for number in range(n))]
    assert set(trailing) == {(("behind", "all"),)}


async def test_what_a_worker_says_at_once_goes_as_few_parts_the_end_with_the_last_message(
    calls: Connection, worker: WiredWorker
) -> None:
    async def say(call: BearerCall) -> None:
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


async def test_a_message_waits_until_the_one_before_has_gone(
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = counting
    client = Client(takes=False)

    call = start(calls, client, b"3")
    for num_passed in (1, 2, 3):
        await until(lambda: len(client.passed) == num_passed)  # noqa: B023
        await asyncio.sleep(0.02)
        assert len(client.passed) == num_passed
        client.takes = num_passed == 3  # the last one may come with the end
        client.take()

    await call.end()
    assert client.passed[1:] == [b"0", b"1", b"2"]


async def test_a_client_that_is_gone_ends_the_call(calls: Connection, worker: WiredWorker) -> None:
    worker.behavior = counting
    client = Client()
    client.is_there = False

    with pytest.raises(aio.InternalError):
        await start(calls, client, b"100").end()

    assert len(client.passed) == 1


async def test_a_client_that_is_gone_at_the_end_is_told_of(
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = counting
    client = Client()
    client.is_there_at_the_end = False

    with pytest.raises(aio.InternalError):
        await start(calls, client, b"2").end()


async def test_what_is_asked_comes_to_the_worker(calls: Connection, worker: WiredWorker) -> None:
    seen: list[Any] = []

    async def note(call: BearerCall) -> None:
        seen.append((call.method, await call.read(), await call.read()))
        seen.append((call.invocation_metadata(), call.time_remaining()))
        await call.finish()

    worker.behavior = note
    await start(calls, Client(), b"request").end()
    await calls.carrier.start("/method", b"", (), None, Client()).end()

    assert seen[0] == ("/method", b"request", aio.EOF)
    assert seen[1][0] == (("key", "value"),) and 500 < seen[1][1] <= 600
    assert seen[3] == ((), None)


async def test_a_client_that_does_not_read_stops_its_own_stream_only(
    calls: Connection, worker: WiredWorker
) -> None:
    said: dict[str, int] = {}

    async def say(call: BearerCall) -> None:
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


async def test_long_messages_count_for_several(calls: Connection, worker: WiredWorker) -> None:
    num_said = 0
    message = bytes(NUM_UNTAKEN << 13)

    async def say(call: BearerCall) -> None:
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
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = counting
    metadata = tuple((f"key-{i}", "v" * 1000) for i in range(8))

    ends = [
        calls.carrier.start("/method", b"1", metadata, 600.0, Client()).end() for _ in range(1000)
    ]
    await asyncio.gather(*ends)


async def test_a_gateway_that_is_busy_is_sent_no_more_than_it_looks_at(
    calls: Connection, worker: WiredWorker
) -> None:
    num_said = 0
    busy = Busy()

    async def say(call: BearerCall) -> None:
        nonlocal num_said
        for _ in range(NUM_UNTAKEN - 1):
            await call.write(b"some")
            num_said += 1
        await call.finish()

    worker.behavior = say
    num_calls = 2 * NUM_UNHEARD // NUM_UNTAKEN
    ends = [
        start(calls, client).end() for client in (busy, *(Client() for _ in range(num_calls - 1)))
    ]
    await until(lambda: num_said >= NUM_UNHEARD)
    await asyncio.sleep(0.05)
    said_meanwhile = num_said
    busy.is_free.set()
    await asyncio.gather(*ends)

    assert NUM_UNHEARD <= said_meanwhile < NUM_UNHEARD + num_calls
    assert num_said == num_calls * (NUM_UNTAKEN - 1)


async def test_a_failure_comes_behind_what_was_sent_before_it(
    calls: Connection, worker: WiredWorker
) -> None:
    async def fail(call: BearerCall) -> None:
        await call.write(b"begun")
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("why-bin", b"\x00"),))

    worker.behavior = fail
    client = Client()
    with pytest.raises(WorkerFailed) as failed:
        await start(calls, client).end()

    assert client.passed == [b"begun"]
    assert failed.value.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.status.message == "full"
    assert failed.value.status.trailing_metadata == (("why-bin", b"\x00"),)


async def test_a_fault_of_one_call_ends_that_call_only(
    calls: Connection, worker: WiredWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(call: BearerCall) -> None:
        if await call.read() == b"wrong":
            raise ValueError("unforeseen")
        await call.finish()

    worker.behavior = fail
    with pytest.raises(WorkerFailed) as failed:
        await start(calls, Client(), b"wrong").end()
    await start(calls, Client(), b"right").end()

    assert failed.value.status.code is grpc.StatusCode.UNKNOWN
    assert "unforeseen" in caplog.text


async def test_a_client_that_fails_ends_its_call_only(
    calls: Connection, worker: WiredWorker, caplog: pytest.LogCaptureFixture
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
    how: str, calls: Connection, worker: WiredWorker
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


async def test_a_worker_that_closes_the_wire_ends_its_calls_as_one_that_stops(
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = endless
    client = Client()
    call = start(calls, client)
    await until(lambda: call.is_committed)

    worker.bearers[0].close()
    with pytest.raises(WorkerFailed) as failed:
        await call.end()

    assert failed.value.status.code is grpc.StatusCode.UNAVAILABLE
    assert any(key == "grpc-status-details-bin" for key, _ in failed.value.status.trailing_metadata)
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_an_answer_that_was_said_whole_outlives_the_wire(
    calls: Connection, worker: WiredWorker
) -> None:
    worker.behavior = counting
    client = Client(takes=False)
    call = start(calls, client, b"5")
    await until(lambda: call.status is not None)  # the client has the first part only

    calls.close()
    await until(lambda: calls.carrier.has_ended)
    call_of_others = start(calls, Client())
    with pytest.raises(WorkerFailed):
        await call_of_others.end()
    client.takes = True
    client.take()

    assert await asyncio.wait_for(call.end(), 60) == (("behind", "all"),)
    assert client.passed[1:] == [b"0", b"1", b"2", b"3", b"4"]
    assert call.status is not None and call.status.record is not None


async def test_a_client_that_fails_as_the_wire_ends_ends_its_call_only(
    calls: Connection, worker: WiredWorker
) -> None:
    class Failing(Client):
        def pass_message(self, message: Any, passed: Any, **how: Any) -> None:
            if self.passed and calls.carrier.has_ended:
                raise ZeroDivisionError("a bug")
            super().pass_message(message, passed, **how)

    async def say(call: BearerCall) -> None:
        await call.write(b"0")
        await call.write(b"1")
        await asyncio.Event().wait()

    worker.behavior = say
    failing = Failing()
    failing.takes = False
    wrong, right = start(calls, failing), start(calls, Client())
    await until(lambda: right.is_committed and failing.passed)

    wrong._is_passing = False  # as if it went at this moment
    calls.close()
    with pytest.raises(WorkerFailed):
        await asyncio.wait_for(right.end(), 60)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(wrong.end(), 60)


@pytest.mark.parametrize("is_unary", [True, False], ids=["unary", "stream"])
async def test_long_requests_and_answers_come_whole(
    is_unary: bool, calls: Connection, worker: WiredWorker
) -> None:
    async def echo(call: BearerCall) -> None:
        request = await call.read()
        await call.write(request)
        await call.write(b"behind")
        await call.finish(request[1:])

    async def answer(call: BearerCall) -> None:
        await call.finish(await call.read())

    worker.behavior = answer if is_unary else echo
    clients = [Client() for _ in range(3)]
    ended = [start(calls, None if is_unary else client, LONG) for client in clients]
    await asyncio.gather(*(call.end() for call in ended))

    if is_unary:
        assert [call.response for call in ended] == [LONG] * 3
    else:
        assert [client.passed for client in clients] == [[LONG, b"behind", LONG[1:]]] * 3


async def test_a_long_request_goes_in_pieces_between_which_others_go(worker: WiredWorker) -> None:
    came: list[bytes] = []
    told: list[ToWorker] = []

    class Noting(Bearer):
        def _take(self, data: bytes | None) -> None:
            told.append(ToWorker.FromString(data or b""))
            super()._take(data)

    async def note(call: BearerCall) -> None:
        came.append(await call.read())
        await call.write(b"some")
        await call.write(b"more")
        await call.finish()

    worker.behavior = note
    worker.carrying = lambda call: Noting(call, worker.answer, worker.told)  # type: ignore[method-assign]
    connection = Connection(worker.address, ())
    connection.carry(60.0)
    busy = Busy()
    ended = [start(connection, busy, b"first")]
    await asyncio.to_thread(busy.is_busy.wait, 60)  # nobody hears that anything has gone
    ended += [start(connection, Client(), LONG) for _ in range(2)]
    ended += [start(connection, Client(), b"%d" % number) for number in range(20)]
    busy.is_free.set()
    await asyncio.gather(*(call.end() for call in ended))
    connection.close()

    assert came[-2:] == [LONG] * 2 and len(came) == 23
    assert max(one.ByteSize() for one in told) < 3 * CHUNK
    order = [chunk.number for one in told for chunk in one.chunks]
    assert order[:6] in ([2, 3] * 3, [2, 2, 3, 2, 3, 2])  # they take turns


async def test_a_request_may_come_in_pieces_while_its_call_runs(
    calls: Connection, worker: WiredWorker
) -> None:
    async def echo(call: BearerCall) -> None:
        while (message := await call.read()) is not aio.EOF:
            await call.write(message)
        await call.finish()

    worker.behavior = echo
    client = Client()
    call = calls.carrier.start("/method", b"first", (), 600.0, client, is_followed=True)
    await until(lambda: client.passed == [b"first"])
    call.send(LONG, is_last=False)
    await until(lambda: client.passed == [b"first", LONG])
    call.send(b"last", is_last=True)
    await call.end()

    assert client.passed == [b"first", LONG, b"last"]


async def test_an_answer_of_one_message_is_kept_for_what_asks(
    calls: Connection, worker: WiredWorker
) -> None:
    async def answer(call: BearerCall) -> None:
        await call.finish(b"the answer to " + await call.read())

    worker.behavior = answer
    call = start(calls, None, b"it")
    await call.end()

    assert call.response == b"the answer to it"


async def test_a_call_that_is_cancelled_before_it_is_sent_is_never_asked(
    calls: Connection, worker: WiredWorker
) -> None:
    asked: list[bytes] = []
    busy = Busy()

    async def note(call: BearerCall) -> None:
        asked.append(await call.read())
        await call.write(b"some")
        await call.write(b"more")
        await call.finish()

    worker.behavior = note
    ended = [start(calls, busy, b"1")]
    await asyncio.to_thread(busy.is_busy.wait, 60)
    ended.append(start(calls, Client(), b"2"))  # is sent; nobody hears that it has gone
    start(calls, Client(), b"3").cancel()
    ended.append(start(calls, Client(), b"4"))
    busy.is_free.set()
    await asyncio.gather(*(call.end() for call in ended))

    assert asked == [b"1", b"2", b"4"]


@pytest.mark.filterwarnings("error")
async def test_a_call_that_is_cancelled_as_it_comes_is_not_answered(worker: WiredWorker) -> None:
    answered: list[bytes] = []

    async def note(call: BearerCall) -> None:
        answered.append(await call.read())
        await call.finish()

    worker.behavior = note
    asked = [{"number": number, "request": b"%d" % number} for number in (1, 2)]
    async with raw_gateway(worker) as gateway:
        await gateway.write(ToWorker(hello=protocol.hello()).SerializeToString())
        await gateway.write(ToWorker(calls=asked, cancelled=[1]).SerializeToString())
        await until(lambda: answered)
    gc.collect()

    assert answered == [b"2"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff",
        ToWorker(calls=[{"number": 1}]).SerializeToString(),
        ToWorker(calls=[{"number": 2}, {"number": 2}]).SerializeToString(),
    ],
    ids=["no message", "a call that runs", "a call twice"],
)
async def test_what_is_no_message_ends_the_wire(
    garbage: bytes, worker: WiredWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.behavior = endless
    async with raw_gateway(worker) as gateway:
        await gateway.write(ToWorker(hello=protocol.hello()).SerializeToString())
        await gateway.write(ToWorker(calls=[{"number": 1}]).SerializeToString())
        await gateway.write(garbage)
        with suppress(aio.AioRpcError):
            while await gateway.read() is not aio.EOF:
                pass

        assert await gateway.code() is grpc.StatusCode.UNAVAILABLE
    assert "no message of the wire" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff",
        FromWorker(numbers=[1], ended=[{"number": 1}]).SerializeToString(),
        FromWorker(log=[{"level": 40, "fields": "["}]).SerializeToString(),
        FromWorker(log=[{"level": 40, "fields": "7"}]).SerializeToString(),
    ],
    ids=["no message", "a number without a message", "no JSON", "no fields"],
)
async def test_what_is_no_message_of_a_worker_ends_the_wire(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def say(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield FromWorker(hello=protocol.hello()).SerializeToString()
        yield garbage
        await asyncio.Event().wait()

    async with raw_worker(say) as address:
        connection = Connection(address, (), log=partial(log_of_worker, worker=address))
        connection.carry(60.0)
        with pytest.raises(WorkerFailed) as failed:
            await asyncio.wait_for(start(connection, Client()).end(), 60)
        connection.close()

    assert failed.value.status.code is grpc.StatusCode.UNAVAILABLE
    assert "no message of the wire" in caplog.text


async def test_what_a_worker_says_twice_is_heard_once() -> None:
    begun = {"number": 1, "metadata": [{"key": "replica", "value": b"1"}]}
    ends = [{"number": 1}, {"number": 1, "code": 14}]
    said = FromWorker(begun=[begun, begun], numbers=[1, 1], messages=[b"0", b"1"], ended=ends)

    async def say(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield FromWorker(hello=protocol.hello()).SerializeToString()
        async for request in requests:
            if ToWorker.FromString(request).calls:
                yield said.SerializeToString()

    async with raw_worker(say) as address:
        connection = Connection(address, ())
        connection.carry(60.0)
        client = Client(takes=False)
        call = start(connection, client)
        for num_passed in (1, 2):
            await until(lambda: len(client.passed) == num_passed)  # noqa: B023
            client.take()
        await asyncio.wait_for(call.end(), 60)
        connection.close()

    assert client.passed == [{"replica": "1"}, b"0", b"1"] and len(client.ends) == 1


async def test_a_call_at_a_worker_that_is_not_connected_fails_as_one_that_is_gone() -> None:
    connection = Connection("127.0.0.1:1", ())
    with pytest.raises(WorkerFailed) as failed:
        await start(connection, Client()).end()
    connection.close()

    assert failed.value.status.code is grpc.StatusCode.UNAVAILABLE


async def test_a_connection_whose_calls_end_at_once_is_closed(
    calls: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("calls to")]

    send_close = core.send_close

    def late() -> core.Operation:
        time.sleep(0.2)  # in which the thread would find nothing open any more
        return send_close()

    monkeypatch.setattr(core, "send_close", late)
    calls.close()

    await until(lambda: not threads())


async def test_a_worker_tells_its_state_at_once_when_it_turns_and_every_now_and_then(
    worker: WiredWorker,
) -> None:
    connection = Connection(worker.address, ())
    states = connection.carry(0.01).states()
    first, second = await anext(states), await anext(states)
    worker.state = State(serving=False, num_calls=3)
    worker.bearers[0].send_state()
    while (turned := await anext(states)).serving:
        pass
    connection.close()

    assert first.serving and first.HasField("models")
    assert second.serving and not second.HasField("models")  # as before
    assert turned.num_calls == 3


# Versions. There is only one so far; the other side has a neighbour's number.


NEIGHBOUR, STRANGER, NOBODY = protocol.VERSION + 1, protocol.VERSION + 2, 0


@pytest.mark.parametrize("other", [NEIGHBOUR, STRANGER, NOBODY])
async def test_a_worker_works_with_gateways_of_neighbouring_versions_only(
    other: int, worker: WiredWorker
) -> None:
    async with raw_gateway(worker) as gateway:
        hello = Hello(version=other, release="9.9.9")
        await gateway.write(ToWorker(hello=hello).SerializeToString())
        if other == NEIGHBOUR:
            said = FromWorker.FromString(await gateway.read())
            assert said.hello.version == protocol.VERSION and said.state.serving
        else:
            assert await gateway.code() is grpc.StatusCode.FAILED_PRECONDITION
            details = await gateway.details()
            assert f"9.9.9 (version {other} of the wire)" in details
            assert f"(version {protocol.VERSION})" in details


def test_metadata_is_the_same_behind_the_wire() -> None:
    metadata = (("key", "value"), ("some-bin", b"\x00\xff"))

    assert metadata_of(pairs_of(metadata)) == metadata


async def test_a_new_gateway_works_with_an_old_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is the recorded one of version 1: its bytes are as it has said them."""
    hello = (
        b'\n\t\x08\x01\x12\x050.1.0\x12\x14\x08\x01\x18\x01"\x0e\n\x0c\n\x05dates\x12\x017\x18\x03'
    )
    answer = b'"\x01\x01*\x03\n\x01r:\x02\x08\x01'

    async def say(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if b"Generate" in request:
                yield answer
            else:
                yield hello

    monkeypatch.setattr(protocol, "VERSION", 2)
    async with raw_worker(say) as address, running_gateway(address) as (gateway, stubs):
        await until(lambda: gateway.pool.num_serving == 1)
        response = await stubs.generation.Generate(generate("a"))
        models = await stubs.admin.ListModels(admin_service_pb2.ListModelsRequest())

    assert response.request_id == "r"
    assert [(one.model, one.model_version) for one in models.models] == [("dates", "7")]


async def test_a_gateway_sends_a_worker_of_another_time_nothing_and_names_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def say(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        hello = Hello(version=STRANGER, release="9.9.9")
        yield FromWorker(hello=hello, state=State(serving=True)).SerializeToString()
        await asyncio.Event().wait()

    async with raw_worker(say) as address, running_gateway(address) as (gateway, _):
        await until(lambda: f"no calls go to worker {address}" in caplog.text)
        assert gateway.pool.num_serving == 0

    assert f"(version {protocol.VERSION} of the wire)" in caplog.text
    assert f"worker of Tokenweir 9.9.9 (version {STRANGER})" in caplog.text
