"""The wall counts what is open, bounds what is read at once, and forgets what has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import aio

from engine.errors import ExpiredInQueue, MalformedMessage, QueueFull
from server import call_wall
from server.call_wall import CallWall, RequestReader


class Call:
    """The context of a call whose message comes when a test says so."""

    def __init__(self, connection: str = "") -> None:
        self.connection = connection
        self.is_read = False
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return self.connection

    async def read(self) -> Any:
        self.is_read = True
        return await self.message


def test_calls_are_counted_until_they_end() -> None:
    wall = CallWall(1, 100)
    with wall.counted(), pytest.raises(QueueFull), wall.counted():
        pass

    with wall.counted():
        pass


def test_bytes_are_counted_until_the_call_ends_and_one_request_may_be_larger() -> None:
    wall = CallWall(9, 100)
    with wall.holding(60), pytest.raises(QueueFull, match="60 bytes, 41 more"), wall.holding(41):
        pass

    with wall.holding(101):
        pass


async def test_no_more_requests_are_read_at_once_than_fit() -> None:
    reader = RequestReader(CallWall(9, 100), max_bytes=100, max_message_bytes=50)
    calls = [Call(f"connection {i}") for i in range(3)]

    async def run(call: Call) -> None:
        async with reader.read(call) as message:  # type: ignore[arg-type]
            assert message == b"bytes"

    tasks = [asyncio.create_task(run(call)) for call in calls]
    await asyncio.sleep(0)
    assert [call.is_read for call in calls] == [True, True, False]

    for call in calls:
        call.message.set_result(b"bytes")
    await asyncio.gather(*tasks)


async def test_calls_that_bring_nothing_do_not_keep_other_connections_waiting() -> None:
    reader = RequestReader(CallWall(9, 100), max_bytes=80, max_message_bytes=10)
    silent = [Call("silent") for _ in range(20)]
    other = Call("other")
    other.message.set_result(b"bytes")

    async def run(call: Call) -> bytes:
        async with reader.read(call) as message:  # type: ignore[arg-type]
            return message

    tasks = [asyncio.create_task(run(call)) for call in silent]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(run(other), 5) == b"bytes"

    for call in silent:
        call.message.set_result(b"bytes")
    assert await asyncio.gather(*tasks) == [b"bytes"] * 20


@pytest.mark.parametrize(
    ("ends", "error"),
    [(True, MalformedMessage), pytest.param(False, ExpiredInQueue, id="it may be on its way")],
)
async def test_a_call_that_brings_no_message_ends(
    ends: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_wall, "_READ_TIMEOUT", 0.0)
    reader = RequestReader(CallWall(9, 100), max_bytes=100, max_message_bytes=50)
    call = Call()
    if ends:
        call.message.set_result(aio.EOF)

    with pytest.raises(error):
        async with reader.read(call):  # type: ignore[arg-type]
            pass
