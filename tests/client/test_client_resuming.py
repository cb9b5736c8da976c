"""For how long, and how often, a client asks for the rest of a stream that broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tokenweir import AsyncClient, Cancelled, ResourceExhausted, Unavailable
from tokenweir._streams import Resumption
from tokenweir.received import ORIGIN_KEY
from tokenweir.v1 import generation_service_pb2 as pb

from engine.errors import QueueFull, ReplicaLost, TokenweirError
from server.calls.status import CallStatus, call_status
from tests.fakes.clock import FakeClock


class Broken(grpc.RpcError):
    """A call of a stream that has ended with an error."""

    def __init__(self, *, has_begun: bool, error: TokenweirError | None = None) -> None:
        self._metadata = ((ORIGIN_KEY, "origin"),) if has_begun else ()
        closed = CallStatus(grpc.StatusCode.UNAVAILABLE, "Socket closed", ())
        self._status = closed if error is None else call_status(error, "r")

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.message

    def initial_metadata(self) -> Any:
        return self._metadata

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


LOST, FULL = ReplicaLost("gone", 0.5), QueueFull("full", 1.5)


def resumption(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, most: int) -> Resumption[Any]:
    monkeypatch.setattr("tokenweir._streams.time", SimpleNamespace(monotonic=clock))
    return Resumption(lambda *asked, **more: None, (), pb.GenerateStreamRequest(), None, most)


def test_a_stream_that_broke_waits_for_its_server_and_not_for_ever(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resumption(clock, monkeypatch, 2)
    clock.now += stream.pause_after(Broken(has_begun=True))

    waited = []
    with pytest.raises(Unavailable):
        for _ in range(1000):
            waited.append(stream.pause_after(Broken(has_begun=False)))
            clock.now += waited[-1]

    assert max(waited) == 2.0  # it is not asked without end
    assert 50 < sum(waited) < 70


def test_a_stream_breaks_as_often_as_it_may_however_long_its_server_is_away(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resumption(clock, monkeypatch, 3)

    for _ in range(2):
        for has_begun in (True, False, False, False, False):
            clock.now += stream.pause_after(Broken(has_begun=has_begun)) + 5

    with pytest.raises(Unavailable):
        stream.pause_after(Broken(has_begun=True))


def test_who_is_told_of_a_loss_does_not_wait_for_what_may_never_come(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resumption(clock, monkeypatch, 3)
    stream.pause_after(Broken(has_begun=True))
    stream.pause_after(Broken(has_begun=False, error=LOST))

    with pytest.raises(Unavailable):
        stream.pause_after(Broken(has_begun=False, error=LOST))


def test_a_server_that_is_full_is_asked_again_when_it_says(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resumption(clock, monkeypatch, 2)
    stream.pause_after(Broken(has_begun=True))

    assert stream.pause_after(Broken(has_begun=False, error=FULL)) == 1.5


def test_a_stream_that_has_not_begun_is_not_asked_for_again(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resumption(clock, monkeypatch, 5)

    with pytest.raises(ResourceExhausted):
        stream.pause_after(Broken(has_begun=False, error=FULL))
    with pytest.raises(Unavailable):
        stream.pause_after(Broken(has_begun=False))


def serving(answer: Callable[[bytes, Any], Iterator[bytes]]) -> tuple[grpc.Server, str]:
    """Start a server whose streams are these; return it and its address."""
    service = {"GenerateStream": grpc.unary_stream_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tokenweir.v1.GenerationService", service),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


async def test_a_client_that_is_closed_waits_for_no_server() -> None:
    def begin(request: bytes, context: Any) -> Iterator[bytes]:
        context.send_initial_metadata(((ORIGIN_KEY, "origin"),))
        yield pb.GenerateStreamResponse(sequence_number=1, delta={"text": "a"}).SerializeToString()
        server.stop(None)

    server, address = serving(begin)
    async with AsyncClient(address) as client:
        stream = client.stream("m", "a")
        assert await anext(stream) == "a"
        rest = asyncio.ensure_future(anext(stream))
        while stream._resumption._first_error is None:
            await asyncio.sleep(0.01)
        await client.close()

        with pytest.raises(Cancelled):
            await rest


async def test_a_stream_that_breaks_behind_all_of_its_answer_is_not_asked_for_again() -> None:
    num_asked = 0

    def answer(request: bytes, context: Any) -> Iterator[bytes]:
        nonlocal num_asked
        num_asked += 1
        context.send_initial_metadata(((ORIGIN_KEY, "origin"),))
        yield pb.GenerateStreamResponse(sequence_number=1, delta={"text": "a"}).SerializeToString()
        yield pb.GenerateStreamResponse(sequence_number=2, summary={}).SerializeToString()
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    server, address = serving(answer)
    async with AsyncClient(address) as client:
        found = [one.sequence_number async for one in client.stream_messages("m", "a", 3)]
    server.stop(None)

    assert (found, num_asked) == ([1, 2], 1)
