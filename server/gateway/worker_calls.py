"""Calls to a worker, whose messages are handed to clients without the event loop.

grpc.aio wakes its event loop for every message, and once more when it has gone. This stands on
its core, as CallServer does: one thread takes what happens to all calls of a connection, and hands
each message to the client's call. The event loop hears of the end. If the worker has a lane,
small requests for streams go by that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import grpc

from server import grpc_core as core
from server.gateway.lane import Lane, pairs_in, status_in
from server.grpc_core import CANCELLED, NO_FLAGS, Event
from server.lane import MAX_REQUEST_BYTES, Metadata
from server.wire.worker_call import Client, WorkerCall

logger = logging.getLogger(__name__)

_LANE_PAUSE = 1.0  # seconds before a worker is asked again for a lane that has ended


class WorkerCalls:
    """A connection to one worker, there from the first call on."""

    def __init__(
        self,
        address: str,
        options: Iterable[tuple[str, int | str]],
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Encrypt what is sent if there are credentials."""
        inner = None if credentials is None else core.inner(credentials)
        self._channel = core.Channel(address.encode(), tuple(options), inner)
        self._open: set[OwnCall | Lane] = set()
        self._is_closing = False
        self._closing = threading.Lock()  # nothing is started while the thread closes
        self._lane: Lane | None = None
        self._lane_asked = -_LANE_PAUSE  # when, on the monotonic clock
        threading.Thread(target=self._follow, name=f"calls to {address}", daemon=True).start()

    def start(
        self,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
        client: Client | None,
    ) -> WorkerCall:
        """Send a request; hand the answer to a client as it comes, or keep the one message."""
        if client is not None and len(request) <= MAX_REQUEST_BYTES:
            if (lane := self._open_lane()) is not None:
                return lane.start(method, request, metadata, timeout, client)
        return self.start_alone(method, request, metadata, timeout, client)

    def start_alone(
        self,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
        client: Client | None,
    ) -> WorkerCall:
        """Do the same, never by a lane."""
        call = OwnCall(client, self._open)
        call.start(self._channel, method, request, metadata, timeout)
        return call

    def close(self) -> None:
        """End all calls; the connection closes behind the last of them."""
        if self._is_closing:
            return
        with self._closing:
            self._is_closing = True
            self.start_alone("/", b"", (), 0.0, None)  # its end wakes the thread
        for call in tuple(self._open):
            call.cancel()

    def _open_lane(self) -> Lane | None:
        """Return a lane that takes calls; None while there is none, but ask for one."""
        if self._lane is not None and not self._lane.has_ended:
            return self._lane if self._lane.is_open else None
        now = time.monotonic()
        if now - self._lane_asked >= _LANE_PAUSE and not self._is_closing:
            self._lane_asked = now
            self._lane = Lane(self._open)
            self._lane.start_at(self._channel)
        return None

    def _follow(self) -> None:
        while self._passed_on(self._channel.next_call_event()):
            pass

    def _passed_on(self, event: Event) -> bool:
        """Pass on what happened to a call, in the thread; return whether more may come."""
        try:
            if event.tag is not None:
                event.tag(event)
        except Exception:
            logger.exception("what a worker has sent was not passed on")
        with self._closing:
            if self._open or not self._is_closing:
                return True
            self._channel.close(CANCELLED, "the connection is closed")
        return False


class OwnCall(WorkerCall):
    """A call that is one of gRPC, too."""

    def __init__(self, client: Client | None, open_calls: set[OwnCall | Lane]) -> None:
        super().__init__(client)
        self._open_calls = open_calls
        self._num_due = 0  # events that are to come

    def start(
        self,
        channel: Any,
        method: str,
        request: bytes,
        metadata: Metadata,
        timeout: float | None,
    ) -> None:
        """Send the request."""
        sending = (
            core.send_metadata(metadata),
            core.send_message(request),
            core.send_close(),
            core.receive_status(),
        )
        beginning = (core.receive_metadata(),)
        deadline = None if timeout is None else time.time() + timeout
        with self._lock:
            self._open_calls.add(self)
            self._num_due = 2
            self._call = channel.integrated_call(
                NO_FLAGS,
                method.encode(),
                None,
                deadline,
                (),
                None,
                ((sending, self._has_ended), (beginning, self._has_begun)),
            )

    def _cancel_there(self) -> None:
        self._call.cancel(CANCELLED, "the call was cancelled")

    def _ask_for_more(self, behind: bytes) -> None:
        self._read()

    @property
    def _is_due(self) -> bool:
        return self._num_due > 0

    def _leave(self) -> None:
        self._open_calls.discard(self)

    def _has_begun(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._take_metadata(pairs_in(event.batch_operations[0].initial_metadata()))
            self._read()
            self._go_on()

    def _has_come(self, event: Event) -> None:
        message = event.batch_operations[0].message()
        with self._lock:
            self._num_due -= 1
            if message is not None:
                self._take(message)
            self._go_on()

    def _has_ended(self, event: Event) -> None:
        with self._lock:
            self._num_due -= 1
            self._status = status_in(event)
            self._go_on()

    def _read(self) -> None:
        """Ask for the next message: gRPC tells of the end once there is none."""
        if not self._is_over and self._status is None:
            operation = (core.receive_message(),)
            self._num_due += bool(self._call.operate(operation, self._has_come))
