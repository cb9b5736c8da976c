"""The outer wall of a server: how many calls, and how many bytes of requests, it holds at once.

gRPC's own wall, `maximum_concurrent_rpcs`, stands before health checks too and answers without
details, so this one is counted here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import QueueFull

_RETRY_AFTER = 1.0  # seconds


class CallWall:
    """Counts calls, from any thread, and bytes; refuses beyond the limits with QueueFull."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._num_calls = self._num_bytes = 0

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count a call and the bytes of its request in the block."""
        self.enter()
        try:
            self.hold(num_bytes)
            try:
                yield
            finally:
                self.release(num_bytes)
        finally:
            self.leave()

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
