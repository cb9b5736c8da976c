"""A lane to a worker: one gRPC call, in which the answers of many streams come."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from server import grpc_core as core
from server.grpc_core import CANCELLED, NO_FLAGS, Event
from server.lane import (
    MAX_BYTES,
    METHOD,
    NUM_HEARD,
    NUM_TAKEN,
    OPEN,
    Asked,
    FromWorker,
    Metadata,
    ToWorker,
    metadata_of,
    pairs_of,
    weight,
)
from server.wire.worker_call import Client, Status, WorkerCall

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part")  # any part of an answer

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_LEAST_SECONDS = 1e-6  # 0 is no deadline


class Lane:
    """Carries calls once the worker has said that it takes them; see server/lane.py.

    A call has the lock of its own before it has that of the lane, never the other way round.
    """

    def __init__(self, open_calls: set[Any]) -> None:
        """Be among the open calls of the connection until the lane has ended."""
        self.is_open = self.has_ended = False
        self._open_calls = open_calls
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, LaneCall] = {}
        self._asked: list[Any] = []
        self._taken: list[int] = []
        self._cancelled: list[int] = []
        self._num_heard = 0  # messages, of which the worker was not told
        self._is_sending = False
        self._num_due = 0  # events that are to come
        self._status: Status | None = None

    def start_at(self, channel: Any) -> None:
        """Ask the worker for it."""
        opening = (
            core.send_metadata(()),
            core.receive_status(),
        )
        beginning = (core.receive_metadata(),)
        with self._lock:
            self._open_calls.add(self)
            self._num_due = 2
            self._call = channel.integrated_call(
                NO_FLAGS,
                METHOD.encode(),
                None,
                None,
                (),
                None,
                ((opening, self._has_ended), (beginning, self._has_begun)),
            )

    def start(
        self, method: str, request: bytes, metadata: Metadata, timeout: float | None, client: Client
    ) -> WorkerCall:
        """Send a request; hand the answer to a client as it comes."""
        call = LaneCall(client, self, next(self._numbers))
        asked = Asked(
            number=call.number,
            method=method,
            request=request,
            metadata=pairs_of(metadata),
            seconds=0.0 if timeout is None else max(timeout, _LEAST_SECONDS),
        )
        with self._lock:
            self._calls[call.number] = call
            self._asked.append(asked)
            self._send()
            status = self._status
        if status is not None:
            self._end_calls(status)
        return call

    def cancel(self) -> None:
        """End the lane, and its calls at the worker."""
        self._call.cancel(CANCELLED, "the connection is closed")

    def took(self, number: int, times: int) -> None:
        """Tell the worker that so many times NUM_TAKEN messages of a call have been taken."""
        with self._lock:
            self._taken += [number] * times
            self._send()

    def leave(self, number: int, *, is_cancelled: bool) -> None:
        """Know a call no more."""
        with self._lock:
            if self._calls.pop(number, None) is None or not is_cancelled:
                return
            unsent = [asked for asked in self._asked if asked.number != number]
            if len(unsent) == len(self._asked):
                self._cancelled.append(number)
            self._asked = unsent
            self._send()

    def _send(self) -> None:
        """Send what there is, unless something is under way."""
        if self._is_sending or self._status is not None:
            return
        num_heard = self._num_heard if self._num_heard >= NUM_HEARD else 0
        if not (self._asked or self._taken or self._cancelled or num_heard):
            return
        data = ToWorker(taken=self._taken, cancelled=self._cancelled, num_heard=num_heard)
        self._num_heard -= num_heard
        num_bytes = 0
        while self._asked and num_bytes < MAX_BYTES:
            asked = self._asked.pop(0)
            data.asked.append(asked)
            num_bytes += asked.ByteSize()
        self._taken, self._cancelled = [], []
        operation = (core.send_message(data.SerializeToString()),)
        self._is_sending = bool(self._call.operate(operation, self._has_gone))
        self._num_due += self._is_sending

    # In the thread of the worker's connection.

    def _has_begun(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._read()
            # Without it nobody there knows of lanes, whose refusal comes later.
            is_there = OPEN[0] in pairs_in(event.batch_operations[0].initial_metadata())
            self.is_open = is_there and self._status is None
        self._settle()

    def _has_gone(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._is_sending = False
            self._send()
        self._settle()

    def _has_come(self, event: Event) -> None:
        message = event.batch_operations[0].message()
        with self._lock:
            self._num_due -= 1
            if message is not None:
                self._read()
        if message is not None:
            self._hear(message)
        self._settle()

    def _has_ended(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._status, self.is_open = status_in(event), False
        self._settle()

    def _read(self) -> None:
        if self._status is None:
            operation = (core.receive_message(),)
            self._num_due += bool(self._call.operate(operation, self._has_come))

    def _hear(self, message: bytes) -> None:
        try:
            said = FromWorker.FromString(message)
        except DecodeError:
            logger.error("a worker has sent %d bytes that are no message of a lane", len(message))
            self.cancel()
            return
        self._hand_out(said)
        with self._lock:
            self._num_heard += len(said.numbers)
            self._send()

    def _hand_out(self, said: Any) -> None:
        """Give every call what the worker says in it: beginnings, then messages, then ends.

        A call goes on once it has all of it: its end goes with its last message.
        """
        for begun in said.begun:
            self._give(begun.number, LaneCall.begin, metadata_of(begun.metadata))
        for number, message in zip(said.numbers, said.messages, strict=True):
            if (call := self._calls.get(number)) is not None:
                call.take(message)
        for ended in said.ended:
            end = Status(ended.code, ended.details, metadata_of(ended.metadata))
            self._give(ended.number, LaneCall.finish, end)
        for number in dict.fromkeys(said.numbers):
            self._give(number, LaneCall.go_on, None)

    def _give(self, number: int, take: Callable[[LaneCall, _Part], None], part: _Part) -> None:
        """Let a call that is still there take a part of its answer."""
        if (call := self._calls.get(number)) is None:
            return
        try:
            take(call, part)
        except Exception:  # the others go on
            logger.exception("what a worker has sent was not passed on")

    def _settle(self) -> None:
        """End what is open once the lane has ended, and nothing of it is to come."""
        with self._lock:
            status = self._status
            if status is None or self._num_due:
                return
            self.has_ended = True
        self._open_calls.discard(self)
        self._end_calls(status)

    def _end_calls(self, status: Status) -> None:
        """End all calls as those of a worker that is gone, or in its own words."""
        if status.code != _UNAVAILABLE:
            status = Status(_UNAVAILABLE, f"the lane has ended: {status.details}", ())
        for call in tuple(self._calls.values()):
            call.finish(status)


class LaneCall(WorkerCall):
    """A call in a lane."""

    def __init__(self, client: Client, lane: Lane, number: int) -> None:
        super().__init__(client)
        self.number = number
        self._lane = lane
        self._num_taken = 0  # weight of messages, of which the worker was not told

    def begin(self, metadata: Metadata) -> None:
        """Take what comes first."""
        with self._lock:
            self._take_metadata(metadata)

    def take(self, message: bytes) -> None:
        """Take a message, for `go_on` or `finish`."""
        with self._lock:
            self._take(message)

    def go_on(self, _: None) -> None:
        """Hand on what was taken."""
        with self._lock:
            self._go_on()

    def finish(self, status: Status) -> None:
        """Take the end."""
        with self._lock:
            self._status = status
            self._go_on()

    def _cancel_there(self) -> None:
        self._lane.leave(self.number, is_cancelled=self._status is None)

    def _ask_for_more(self, behind: bytes) -> None:
        self._num_taken += weight(behind)
        if times := self._num_taken // NUM_TAKEN:
            self._num_taken %= NUM_TAKEN
            self._lane.took(self.number, times)

    @property
    def _is_due(self) -> bool:
        return False

    def _leave(self) -> None:
        self._lane.leave(self.number, is_cancelled=False)


def status_in(event: Event) -> Status:
    """Return how a call of gRPC has ended."""
    end = event.batch_operations[-1]
    return Status(end.code(), end.details() or "", pairs_in(end.trailing_metadata()))


def pairs_in(metadata: Any) -> Metadata:
    """Return metadata as it comes from gRPC."""
    return tuple((key, value) for key, value in metadata or ())
