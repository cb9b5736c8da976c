"""Reads the messages of calls, so many at once that the gateway has room for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.errors import ExpiredInQueue, FieldViolation, MalformedMessage, TokenweirError
from server.calls.call_server import ServerCall

READ_TIMEOUT = 10.0  # seconds for the bytes of a request to come
_LOOK_PERIOD = 1.0  # seconds between two looks for those that have not come
_CONNECTION_SHARE = 4  # the part of the places, one in so many, that one connection can have


Read = Callable[[bytes | TokenweirError], object]


@dataclass(eq=False, slots=True)
class _Reading:
    """A call whose message is to come."""

    call: ServerCall
    connection: bytes
    read: Read
    started: float = 0.0


class RequestReader:
    """Reads the requests of calls behind a wall, so many at once that they fit its bytes.

    gRPC would read all of them before anybody could count. One connection has only a share of the
    places: its calls that bring no message keep others waiting on it alone. Any thread may use it.
    """

    def __init__(self, *, max_bytes: int, max_message_bytes: int) -> None:
        self._num_free = max(1, max_bytes // max_message_bytes)
        self._share = max(1, self._num_free // _CONNECTION_SHARE)
        self._lock = threading.Lock()
        self._under_way: dict[_Reading, None] = {}  # in order of their start
        self._num_reading: dict[bytes, int] = {}  # by connection
        self._lines: dict[bytes, deque[_Reading]] = {}  # calls that wait for a place

    def read(self, call: ServerCall, read: Read) -> None:
        """Call `read`, from any thread, with the message of a call, or with why there is none.

        That is MalformedMessage if the call has no message, ExpiredInQueue if none comes in time.
        """
        reading = _Reading(call, call.peer(), read)
        with self._lock:
            if reading.connection in self._lines or not self._may_read(reading.connection):
                self._lines.setdefault(reading.connection, deque()).append(reading)
                return
            self._enter(reading)
        call.receive(partial(self._end, reading))

    async def end_late_ones(self) -> None:
        """Look again and again for messages that do not come, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_PERIOD)
            self.end_late()

    def end_late(self) -> None:
        """End what has waited too long for its message."""
        since = time.monotonic() - READ_TIMEOUT
        while (first := next(iter(self._under_way), None)) and first.started <= since:
            what = f"its message did not come within {READ_TIMEOUT:g} s; ask again"
            self._end(first, ExpiredInQueue(what))

    def _end(self, reading: _Reading, result: bytes | TokenweirError | None) -> None:
        with self._lock:
            if reading not in self._under_way:
                return  # the message came too late, or the other way round
            following = self._leave(reading)
        if following is not None:  # first: whatever comes of this one, it has the place
            following.call.receive(partial(self._end, following))
        if result is None:
            result = MalformedMessage([FieldViolation("request", "the call brought no message")])
        reading.read(result)

    def _may_read(self, connection: bytes) -> bool:
        return self._num_free > 0 and self._num_reading.get(connection, 0) < self._share

    def _enter(self, reading: _Reading) -> None:
        reading.started = time.monotonic()
        self._under_way[reading] = None
        self._num_free -= 1
        self._num_reading[reading.connection] = self._num_reading.get(reading.connection, 0) + 1

    def _leave(self, reading: _Reading) -> _Reading | None:
        """Give a place back; return the reading that has it now."""
        del self._under_way[reading]
        self._num_free += 1
        if num_others := self._num_reading.pop(reading.connection) - 1:
            self._num_reading[reading.connection] = num_others
        for connection, line in self._lines.items():
            if self._may_read(connection):
                following = line.popleft()
                if not line:
                    del self._lines[connection]
                self._enter(following)
                return following
        return None
