"""The wire between a worker and the process of its engine."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator

import pytest

from engine import errors
from engine.errors import (
    CannotMeet,
    CapabilityNotSupported,
    FieldViolation,
    InvalidRequest,
    OutOfDeviceMemory,
    Overloaded,
    QueueFull,
    TenantQuota,
    TokenweirError,
    Unavailable,
)
from engine.own_process.wire import Unpacker, Wire, packed
from engine.requests.events import FinishReason, PositionLogprobs, TokenLogprob
from engine.scheduling.output import TokensOutput

SPECIAL: dict[str, TokenweirError] = {
    "CannotMeet": CannotMeet("no time", None),
    "CapabilityNotSupported": CapabilityNotSupported("not here", ("decoding.beam",)),
    "_Retryable": QueueFull("later", 1.5),
    "OutOfDeviceMemory": OutOfDeviceMemory("no room", lacking=5),
    "TenantQuota": TenantQuota("enough", 2.5, tenant="t", quota="tokens: 7"),
}


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(ours), Wire(theirs)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_come_whole_however_their_bytes_are_cut(size: int) -> None:
    messages = [[1, "two"], b"x" * 300, None]
    data = b"".join(map(packed, messages))
    unpacker = Unpacker()

    found = [
        message
        for start in range(0, len(data), size)
        for message in unpacker.push(data[start : start + size])
    ]

    assert found == messages


def test_who_sends_waits_for_one_that_does_not_read(wires: tuple[Wire, Wire]) -> None:
    one, other = wires
    sent: list[int] = []

    def send() -> None:
        for number in range(100):
            one.send((number, b"x" * 50_000))
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.2)
    held = len(sent)
    received = [other.receive()[0] for _ in range(100)]  # type: ignore[index]
    thread.join()

    assert held < 50, "what the other end has not read is bounded"
    assert received == sent == [*range(100)]


def test_an_end_that_is_gone_is_the_end_of_the_messages(wires: tuple[Wire, Wire]) -> None:
    one, other = wires
    one.send("last")
    other.send("never read")
    one.socket.close()

    assert other.receive() == "last"
    with pytest.raises(EOFError):
        other.receive()


def tree(kind: type[TokenweirError]) -> list[type[TokenweirError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


@pytest.mark.parametrize(
    "kind", [one for one in tree(TokenweirError) if one.__module__ == errors.__name__]
)
def test_every_error_crosses_as_it_is(kind: type[TokenweirError]) -> None:
    if issubclass(kind, InvalidRequest):
        error: TokenweirError = kind([FieldViolation("a.b", "is wrong")])
    elif issubclass(kind, Overloaded | Unavailable) and kind is not TenantQuota:
        error = kind("later", 1.5)
    else:
        error = SPECIAL.get(kind.__name__) or kind("words")

    found = pickle.loads(pickle.dumps(error))

    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_tokens_cross_with_all_that_belongs_to_them() -> None:
    position = PositionLogprobs(TokenLogprob(5, -0.5, 1), (TokenLogprob(5, -0.5, 1),))
    output = TokensOutput(3, 1, [5, 6], -1.5, FinishReason.STOP, "x", [position], [(0.5, 0.5)])

    found = pickle.loads(pickle.dumps(output))

    assert found == output and type(found) is TokensOutput
