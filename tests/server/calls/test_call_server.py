"""The server of the gateway: calls refused, answered, cancelled, and left over at the end."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from engine.errors import Draining, QueueFull
from server.calls import call_server
from server.calls.call_server import CallServer, ServerCall
from server.calls.status import call_status
from tests.fakes.calls import failure_of, until

METHOD = "/test.Service/Method"


@asynccontextmanager
async def serving(arrived: Callable[[ServerCall], object]) -> AsyncIterator[aio.Channel]:
    server, channel = started(arrived)
    async with channel:
        try:
            yield channel
        finally:
            await server.stop(0)


def started(arrived: Callable[[ServerCall], object]) -> tuple[CallServer, aio.Channel]:
    server = CallServer(arrived, ())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, aio.insecure_channel(f"127.0.0.1:{port}")


@asynccontextmanager
async def answering(
    answer: Callable[[ServerCall], Coroutine[Any, Any, None]],
) -> AsyncIterator[aio.Channel]:
    async with serving(answered(answer)) as channel:
        yield channel


def answered(
    answer: Callable[[ServerCall], Coroutine[Any, Any, None]],
) -> Callable[[ServerCall], object]:
    loop = asyncio.get_running_loop()
    return lambda call: loop.call_soon_threadsafe(lambda: call.answer(answer(call)))


@pytest.mark.parametrize("when", ["it arrives", "its message is read"])
async def test_a_call_that_cannot_be_taken_in_ends_and_others_are_taken_in(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: ServerCall) -> None:
        if call.method == "/test.Service/Wrong":
            raise ValueError("unforeseen")
        call.refuse(call_status(QueueFull("no room", 0.3), "r"))

    def arrive(call: ServerCall) -> None:
        if when == "it arrives":
            fail(call)
        else:
            call.receive(lambda data: fail(call))

    async with serving(arrive) as channel:
        with pytest.raises(aio.AioRpcError, match="the server failed; see its log") as wrong:
            await channel.unary_unary("/test.Service/Wrong")(b"x", timeout=60)
        other = await failure_of(channel.unary_unary(METHOD)(b"x", timeout=60))

    assert wrong.value.code() is grpc.StatusCode.UNKNOWN
    assert other.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "/test.Service/Wrong failed" in caplog.text and "unforeseen" in caplog.text


async def test_a_call_is_refused_without_a_task_and_without_its_message() -> None:
    status = call_status(QueueFull("no room", 0.3), "r")
    tasks: list[int] = []

    def refuse(call: ServerCall) -> None:
        tasks.append(len(asyncio.all_tasks(loop)))
        call.refuse(status)

    loop = asyncio.get_running_loop()
    async with serving(refuse) as channel:
        before = len(asyncio.all_tasks())
        for _ in range(3):
            refused = await failure_of(channel.unary_unary(METHOD)(b"", timeout=60))

    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (refused.retry_after, refused.metadata["request_id"]) == (0.3, "r")
    assert max(tasks) <= before + 2  # the client's own


async def finished(call: ServerCall) -> None:
    await call.finish(b"answer")


async def passed_on(call: ServerCall) -> None:
    call.pass_end(b"answer", ())


async def aborted(call: ServerCall) -> None:
    await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")


async def failed(call: ServerCall) -> None:
    raise ValueError("unforeseen")


@pytest.mark.parametrize("answer", [finished, passed_on, aborted, failed])
async def test_a_call_is_counted_before_its_client_knows_of_its_end(
    answer: Callable[[ServerCall], Coroutine[Any, Any, None]],
) -> None:
    """Else who asks again at once is judged by what is not true any more."""
    seen: list[str] = []

    def count() -> None:
        time.sleep(0.3)  # in which the client would hear of an end that is on its way
        seen.append("counted")

    async def counting(call: ServerCall) -> None:
        call.before_end(count)
        await answer(call)

    def ask(target: str) -> None:
        with grpc.insecure_channel(target) as channel:
            ended = channel.unary_unary(METHOD).future(b"", timeout=60)
            ended.exception()
            seen.append("ended")

    server = CallServer(answered(counting), ())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    await asyncio.to_thread(ask, f"127.0.0.1:{port}")
    await server.stop(0)

    assert seen == ["counted", "ended"]


async def test_a_call_that_ends_before_its_answer_begins_is_counted() -> None:
    counted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin(call: ServerCall) -> None:
        call.before_end(counted.set)
        call.answer(finished(call)).cancel()

    async with serving(lambda call: loop.call_soon_threadsafe(begin, call)) as channel:
        with pytest.raises(aio.AioRpcError):
            await channel.unary_unary(METHOD)(b"", timeout=0.5)

        assert counted.is_set()


async def test_metadata_messages_and_their_order_pass_both_ways() -> None:
    async def echo(call: ServerCall) -> None:
        await call.send_initial_metadata((("first", "1"),))
        while (message := await call.read()) is not aio.EOF:
            await call.write(message)
        call.set_trailing_metadata((("last-bin", b"\x00"), *call.invocation_metadata()))
        await call.finish()

    sent = [b"%d" % i * 1000 for i in range(500)]
    async with answering(echo) as channel:
        call = channel.stream_stream(METHOD)(iter(sent), metadata=(("mine", "x"),), timeout=60)
        got = [message async for message in call]

        assert got == sent
        assert dict(await call.initial_metadata())["first"] == "1"
        trailing = dict(await call.trailing_metadata())
        assert (trailing["last-bin"], trailing["mine"]) == (b"\x00", "x")


async def test_what_is_passed_on_comes_in_order_and_with_it_the_end() -> None:
    async def answer(call: ServerCall) -> None:
        passed: list[bool] = []
        for number in range(3):
            call.pass_message(b"%d" % number, passed.append, is_followed=True)
            await until(lambda n=number: len(passed) > n)
        assert call.pass_end(b"last", (("behind", "all"),))
        assert passed == [True] * 3
        await call.finish()  # it has ended

    async with answering(answer) as channel:
        stream = channel.unary_stream(METHOD)(b"")
        messages = [message async for message in stream]

    assert messages == [b"0", b"1", b"2", b"last"]
    assert await stream.code() is grpc.StatusCode.OK
    assert ("behind", "all") in tuple(await stream.trailing_metadata())


async def test_a_message_need_not_wait_until_the_metadata_before_it_has_gone() -> None:
    async def answer(call: ServerCall) -> None:
        passed: list[bool] = []
        call.pass_metadata((("first", "1"),), passed.append)
        assert passed == [True]
        call.pass_message(b"message", passed.append, is_followed=True)
        await until(lambda: len(passed) > 1)
        assert call.pass_end(b"last", ())

    async with answering(answer) as channel:
        call = channel.unary_stream(METHOD)(b"", timeout=60)
        got = [message async for message in call]

        assert got == [b"message", b"last"]
        assert dict(await call.initial_metadata())["first"] == "1"


async def test_nothing_is_left_of_a_call_that_has_ended_for_the_collector_of_garbage() -> None:
    left: list[weakref.ref[ServerCall]] = []

    class Passing:
        def __init__(self, call: ServerCall) -> None:
            self.call = call
            self.is_over = False

        def end(self, is_there: bool) -> None:
            self.is_over = True

    async def answer(call: ServerCall) -> None:
        passing = Passing(call)
        left.append(weakref.ref(call))
        call.pass_message(b"message", passing.end)
        await until(lambda: passing.is_over)
        call.pass_end(b"last", ())

    gc.disable()
    try:
        async with answering(answer) as channel:
            assert len([one async for one in channel.unary_stream(METHOD)(b"", timeout=60)]) == 2
            await until(lambda: left[0]() is None)
    finally:
        gc.enable()


async def test_who_does_not_read_is_not_sent_everything() -> None:
    written = 0

    async def write_on(call: ServerCall) -> None:
        nonlocal written
        while True:
            await call.write(bytes(1 << 16))
            written += 1

    async with answering(write_on) as channel:
        call = channel.unary_stream(METHOD)(b"")
        await call.read()
        held = -1
        while held != written < 1000:
            held = written
            await asyncio.sleep(0.5)

        assert written < 1000
        call.cancel()


async def test_an_answer_is_cancelled_when_its_client_goes_away() -> None:
    ended: list[type[BaseException]] = []

    async def wait(call: ServerCall) -> None:
        await call.send_initial_metadata(())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ended.append(type(error))
            raise

    async with answering(wait) as channel:
        call = channel.unary_stream(METHOD)(b"")
        await call.initial_metadata()
        call.cancel()
        await until(lambda: ended == [asyncio.CancelledError])


async def test_an_answer_that_fails_ends_its_call(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(call: ServerCall) -> None:
        raise ValueError("no answer")

    async with answering(fail) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD)(b"", timeout=60)

    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert "no answer" not in (caught.value.details() or "")
    assert "no answer" in caplog.text


async def test_the_deadline_is_known_and_none_is_none() -> None:
    seen: list[float | None] = []

    async def look(call: ServerCall) -> None:
        seen.append(call.time_remaining())
        await call.finish(b"")

    async with answering(look) as channel:
        await channel.unary_unary(METHOD)(b"", timeout=600)
        await channel.unary_unary(METHOD)(b"")

    assert seen[0] is not None and 500 < seen[0] <= 600 * 1.01  # on the wire it is rounded up
    assert seen[1] is None


async def test_stopping_ends_calls_that_go_on() -> None:
    begun = asyncio.Event()

    async def wait(call: ServerCall) -> None:
        begun.set()
        await asyncio.Event().wait()

    server, channel = started(answered(wait))
    async with channel:
        call = channel.unary_unary(METHOD)(b"")
        await begun.wait()
        await server.stop(0)
        ended = await failure_of(call)

    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_stopping_ends_streams_whose_client_does_not_read() -> None:
    async def write_on(call: ServerCall) -> None:
        while True:
            await call.write(bytes(1 << 16))

    server, channel = started(answered(write_on))
    async with channel:
        call = channel.unary_stream(METHOD)(b"")
        await call.read()
        await server.stop(0)
        with pytest.raises(aio.AioRpcError) as caught:  # once it reads what has come
            while await call.read() is not aio.EOF:
                pass

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stopping_ends_calls_whose_message_has_not_come() -> None:
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def arrive(call: ServerCall) -> None:
        call.receive(lambda data: call.refuse(call_status(QueueFull("no room", 0.3), "r")))
        loop.call_soon_threadsafe(reading.set)

    server, channel = started(arrive)
    async with channel:
        call = channel.stream_unary(METHOD)()
        await reading.wait()
        await server.stop(0)
        ended = await failure_of(call)

    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_stopping_answers_calls_that_grpc_has_not_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    status = call_status(Draining("stopping", 0.5), "r")

    async def echo(call: ServerCall) -> None:
        while (message := await call.read()) is not aio.EOF:
            await call.write(message)
        await call.finish()

    def arrive(call: ServerCall) -> None:
        if call.method == "/test.Service/Echo":
            loop.call_soon_threadsafe(lambda: call.answer(echo(call)))
        else:
            call.refuse(status)

    server, channel = started(arrive)
    async with channel:
        order = channel.stream_stream("/test.Service/Echo")()
        await order.write(b"first")
        await order.read()
        monkeypatch.setattr(server, "_ask_for_next", lambda: None)
        calls = [asyncio.ensure_future(channel.unary_unary(METHOD)(b"")) for _ in range(20)]
        for _ in range(2):  # an answer has come behind the calls
            await order.write(b"behind them")
            await order.read()
        monkeypatch.undo()
        stopping = asyncio.create_task(server.stop(5))
        ended = await asyncio.gather(*map(failure_of, calls))
        await order.done_writing()
        await stopping

    assert {(one.code, one.reason) for one in ended} == {(grpc.StatusCode.UNAVAILABLE, "DRAINING")}


def test_one_file_knows_the_core_of_grpc() -> None:
    root = Path(call_server.__file__).parents[2]
    files = (file for room in ("server", "loadtest") for file in (root / room).rglob("*.py"))

    assert [file.name for file in files if "cygrpc" in file.read_text()] == ["grpc_core.py"]
