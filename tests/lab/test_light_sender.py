"""Calls of the light sender: how they end, and when they are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from loadtest.errors import LoadTestError
from loadtest.lab import light_sender
from loadtest.lab.light_sender import LightSender

pytestmark = pytest.mark.long

METHOD = "/test.Service/Stream"
Answer = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


@contextmanager
def asking(answer: Answer, timeout: float = 10.0) -> Iterator[LightSender]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    handler = grpc.unary_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Stream": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with closing(LightSender(f"127.0.0.1:{port}", METHOD, timeout)) as sender:
            yield sender
    finally:
        server.stop(0).wait()


def refuse(context: Any) -> None:
    detail = AnyMessage()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="test"))
    status = status_pb2.Status(code=8, details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


def test_streams_are_read_to_their_end_and_refusals_have_their_reason() -> None:
    read = []

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if request == b"bad":
            refuse(context)
        for number in range(3):
            yield b"%d" % number
        read.append(request)  # once everything was taken

    with asking(answer) as sender:
        loop = sender.closed_loop([b"a", b"bad", b"b", b"bad"], concurrency=1)

    assert read == [b"a", b"b"]
    assert [call.ok for call in loop.calls] == [True, False, True, False]
    assert [call.error for call in loop.calls if not call.ok] == [
        "RESOURCE_EXHAUSTED QUEUE_FULL"
    ] * 2
    assert loop.answered_per_second == 2 / loop.seconds


def test_a_closed_loop_has_as_many_calls_at_once_as_it_is_told() -> None:
    lock, under_way, most = threading.Lock(), [0], [0]
    all_there = threading.Barrier(3, timeout=60)

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        all_there.wait()
        with lock:
            under_way[0] -= 1
        yield b""

    with asking(answer) as sender:
        loop = sender.closed_loop([b""] * 9, concurrency=3)

    assert len(loop.calls) == 9 and all(call.ok for call in loop.calls)
    assert most == [3]


def test_an_open_loop_sends_when_calls_are_due_and_counts_from_there() -> None:
    may_end = threading.Event()

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if request == b"last":
            may_end.set()
        may_end.wait(60)
        yield b""

    with asking(answer) as sender:
        loop = sender.open_loop([b"first", b"last"], [0.0, 0.2])

    first, last = sorted(loop.calls, key=lambda call: call.due)
    assert (first.due, last.due) == (0.0, 0.2)
    assert last.sent >= 0.2
    assert first.end_to_end >= 0.2, "it was there until the last one came"
    assert loop.own.loop_delay is not None and loop.own.loop_delay.count == 2


def test_a_call_ends_with_its_deadline_and_one_that_does_not_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        is_over.wait(60)
        yield b""

    with asking(answer, timeout=0.1) as sender:
        loop = sender.open_loop([b""], [0.0])
        assert [call.error for call in loop.calls] == ["DEADLINE_EXCEEDED"]

        monkeypatch.setattr(light_sender, "_PATIENCE", -0.1)
        with pytest.raises(LoadTestError, match="1 of 1 calls have not ended"):
            sender.closed_loop([b""], concurrency=1)
        is_over.set()
