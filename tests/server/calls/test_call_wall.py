"""The wall counts what is open, bounds what is read at once, and forgets what has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import ExpiredInQueue, MalformedMessage, QueueFull, TokenweirError
from server.calls.call_wall import CallWall
from server.gateway import request_reader
from server.gateway.request_reader import RequestReader


class Call:
    """A call whose message comes when a test says so."""

    def __init__(self, connection: str = "") -> None:
        self.results: list[bytes | TokenweirError] = []
        self._connection = connection
        self._received: Callable[[bytes | None], object] | None = None

    @property
    def is_read(self) -> bool:
        return self._received is not None

    def peer(self) -> bytes:
        return self._connection.encode()

    def receive(self, received: Callable[[bytes | None], object]) -> None:
        self._received = received

    def bring(self, message: bytes | None) -> None:
        assert self._received is not None
        self._received(message)


def test_calls_are_counted_until_they_end() -> None:
    wall = CallWall(1, 100)
    with wall.holding(0), pytest.raises(QueueFull, match="1 calls are open"), wall.holding(0):
        pass

    with wall.holding(0):
        pass


def test_bytes_are_counted_until_the_call_ends_and_one_request_may_be_larger() -> None:
    wall = CallWall(2, 100)
    with wall.holding(60), pytest.raises(QueueFull, match="60 bytes, 41 more"), wall.holding(41):
        pass

    with wall.holding(101):
        pass
    with wall.holding(60), wall.holding(40):  # refused bytes are not counted as open
        pass


def test_no_more_requests_are_read_at_once_than_fit() -> None:
    reader = RequestReader(max_bytes=100, max_message_bytes=50)
    calls = [Call(f"connection {i}") for i in range(3)]
    for call in calls:
        reader.read(call, call.results.append)
    assert [call.is_read for call in calls] == [True, True, False]

    calls[1].bring(b"bytes")

    assert calls[2].is_read
    assert [call.results for call in calls] == [[], [b"bytes"], []]


def test_calls_that_bring_nothing_do_not_keep_other_connections_waiting() -> None:
    reader = RequestReader(max_bytes=80, max_message_bytes=10)
    silent = [Call("silent") for _ in range(20)]
    other = Call("other")
    for call in (*silent, other):
        reader.read(call, call.results.append)
    other.bring(b"bytes")
    assert other.results == [b"bytes"]

    for call in silent:
        call.bring(b"bytes")

    assert [call.results for call in silent] == [[b"bytes"]] * 20


def test_a_call_that_ends_without_a_message_is_malformed() -> None:
    reader = RequestReader(max_bytes=100, max_message_bytes=50)
    call = Call()
    reader.read(call, call.results.append)

    call.bring(None)

    assert [type(result) for result in call.results] == [MalformedMessage]


def test_a_message_that_does_not_come_in_time_may_be_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = RequestReader(max_bytes=50, max_message_bytes=50)
    late, other = Call(), Call()
    for call in (late, other):
        reader.read(call, call.results.append)
    reader.end_late()
    assert late.results == []

    monkeypatch.setattr(request_reader, "READ_TIMEOUT", 0.0)
    reader.end_late()
    late.bring(b"too late")
    other.bring(b"bytes")

    assert [type(result) for result in late.results] == [ExpiredInQueue]
    assert other.results in ([b"bytes"], late.results)


def test_a_call_that_cannot_be_taken_in_keeps_no_other_waiting() -> None:
    reader = RequestReader(max_bytes=50, max_message_bytes=50)
    failing, other = Call(), Call()

    def fail(message: bytes | TokenweirError) -> None:
        raise ZeroDivisionError("a bug")

    reader.read(failing, fail)
    reader.read(other, other.results.append)
    with pytest.raises(ZeroDivisionError):
        failing.bring(b"bytes")

    other.bring(b"others")

    assert other.results == [b"others"]
