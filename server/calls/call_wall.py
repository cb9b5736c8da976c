"""The outer wall of a server: how many calls, and how many bytes of requests, it holds at once.

gRPC's own wall, `maximum_concurrent_rpcs`, stands before health checks too and answers without
details, so this one is counted here.
"""

from __future__ import annotations

import threading

from engine.errors import QueueFull

_RETRY_AFTER = 1.0  # seconds


class CallWall:
    """Counts calls, from any thread, and bytes; refuses beyond the limits with QueueFull."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._num_calls = self._num_bytes = 0

    def holding(self, num_bytes: int) -> Holding:
        """Count a call and the bytes of its request in the block."""
        return Holding(self, num_bytes)

    def enter(self) -> None:
        """Count a call as open until `leave`."""
        with self._lock:
            if self._num_calls < self._max_calls:
                self._num_calls += 1
                return
        raise QueueFull(
            f"{self._max_calls:,} calls are open here, the most that may be; "
            f"retry in {_RETRY_AFTER:g} s",
            _RETRY_AFTER,
        )

    def leave(self) -> None:
        """Count a call as ended."""
        with self._lock:
            self._num_calls -= 1

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of a request until `release`, on the event loop."""
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:  # one may be larger
            raise QueueFull(
                f"the open calls have {self._num_bytes:,} bytes, {num_bytes:,} more exceed "
                f"{self._max_bytes:,}; retry in {_RETRY_AFTER:g} s, or send less in a call",
                _RETRY_AFTER,
            )
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count the bytes of a request no more."""
        self._num_bytes -= num_bytes


class Holding:
    """A block in which a call is open."""

    __slots__ = ("_num_bytes", "_wall")

    def __init__(self, wall: CallWall, num_bytes: int) -> None:
        self._wall, self._num_bytes = wall, num_bytes

    def __enter__(self) -> None:
        self._wall.enter()
        try:
            self._wall.hold(self._num_bytes)
        except QueueFull:
            self._wall.leave()
            raise

    def __exit__(self, *error: object) -> None:
        self._wall.release(self._num_bytes)
        self._wall.leave()
