"""A stream whose connection broke is asked for again, behind what has come of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import grpc
import grpc.aio

from tokenweir._errors import (
    NotSupported,
    ResourceExhausted,
    TokenweirClientError,
    Unavailable,
    closed_under_way,
    error_from_call,
    seconds_until,
)
from tokenweir.received import ORIGIN_KEY, ReceivedSequence
from tokenweir.v1 import generation_service_pb2

CallT = TypeVar("CallT")
Request = generation_service_pb2.GenerateStreamRequest

_PAUSE, _MAX_PAUSE = 0.1, 2.0  # seconds before the second attempt, and before any
_PATIENCE = 60.0  # seconds after which a server that was lost is not waited for any more
_LOST = "REPLICA_LOST"  # nobody is there that could go on


class SeenMessages:
    """Lengths and hashes of what has come, of any number of sequences; nothing else is kept."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.is_complete = False  # all of the answer has come
        self._sequences: defaultdict[int, ReceivedSequence] = defaultdict(ReceivedSequence)

    def add(self, message: generation_service_pb2.GenerateStreamResponse) -> None:
        """Note the next message."""
        self.num_messages += 1
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                logprobs = [one.SerializeToString() for one in delta.logprobs]
                sequence = self._sequences[delta.index]
                sequence.add(delta.text.encode(), delta.tokens.ids, logprobs)
            case "finished":
                end = message.finished
                self._sequences[end.index].end = end.SerializeToString()
            case "summary":
                self.is_complete = True

    def received(self) -> list[generation_service_pb2.Received]:
        """Return how much has come of each sequence, for a server to go on behind it."""
        return [one.message(index) for index, one in self._sequences.items()]


class Resumption(Generic[CallT]):
    """Starts the calls of one stream: the first, and those that go on where one broke.

    A call that breaks counts as an attempt. A server that is not there, or has no room, is asked
    again and again: it is being started, or another one in its place.
    """

    def __init__(
        self,
        start: Callable[[Request, float | None], CallT],
        request: Request,
        deadline: float | None,
        max_attempts: int,
    ) -> None:
        """`start` makes a call with a timeout; `deadline` is that of `deadline_after`."""
        self.deadline = deadline
        self._start = start
        self._request = request
        self._num_left = max_attempts
        self._pause = _PAUSE
        self._give_up = 0.0  # when a server is not waited for any more
        self._origin = ""
        self._first_error: TokenweirClientError | None = None

    def begin(self) -> CallT:
        """Return the first call."""
        return self._start(self._request, seconds_until(self.deadline))

    def pause_after(self, error: grpc.RpcError) -> float:
        """Return the seconds after which the stream may go on; raise how it ends if it may not.

        It may after UNAVAILABLE, where it had begun and said where it is from.
        """
        typed = error_from_call(error, self.deadline)
        pairs = cast(grpc.Call, error).initial_metadata() or ()
        origin = next((str(value) for key, value in pairs if key == ORIGIN_KEY), "")
        self._origin = origin or self._origin
        if isinstance(typed, NotSupported) and self._first_error is not None:
            raise self._first_error from error  # whoever answers now cannot go on
        if origin or typed.reason == _LOST:
            self._note_break()
        passing = Unavailable if origin else (Unavailable, ResourceExhausted)
        if not isinstance(typed, passing) or not self._may_go_on():
            raise typed from error
        pause = max(self._pause, min(typed.retry_after or 0.0, _MAX_PAUSE))
        if (left := seconds_until(self.deadline)) is not None and left <= pause:
            raise typed from error
        self._first_error = self._first_error or typed
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        return pause

    def _note_break(self) -> None:
        self._num_left -= 1
        self._pause, self._give_up = _PAUSE, time.monotonic() + _PATIENCE

    def _may_go_on(self) -> bool:
        return bool(self._origin) and self._num_left > 0 and time.monotonic() < self._give_up

    def go_on(self, seen: SeenMessages) -> CallT:
        """Return a call that brings what is behind the messages that were seen.

        Raises Cancelled if the client was closed meanwhile.
        """
        self._request.resume_after = seen.num_messages
        del self._request.received[:]
        self._request.received.extend(seen.received())
        self._request.origin = self._origin
        try:
            return self._start(self._request, seconds_until(self.deadline))
        except (ValueError, grpc.aio.UsageError) as error:  # the channel is
            raise closed_under_way() from error
