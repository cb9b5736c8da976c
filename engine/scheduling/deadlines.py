"""Requests that have passed their deadline, and their errors."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.errors import DeadlineExpired, ExpiredInDecode, ExpiredInQueue
from engine.scheduling.sequence import Request


class Deadlines:
    """Remembers the earliest one, so that requests are looked at only when it has passed."""

    def __init__(self) -> None:
        self._next = math.inf  # none of the requests has an earlier one

    def add(self, deadline: float | None) -> None:
        """Watch a deadline, on the scheduler's clock; None is never."""
        if deadline is not None:
            self._next = min(self._next, deadline)

    def expired(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Return those of all requests that have passed theirs; they are not watched any more."""
        if now < self._next:
            return []
        self._next = math.inf
        expired = []
        for request in requests:
            deadline = request.asked.deadline
            if deadline is not None and deadline <= now:
                expired.append(request)
            else:
                self.add(deadline)
        return expired


def expired(request: Request, now: float, *, num_running: int) -> DeadlineExpired:
    """Return the error of a request whose deadline passed while it waited, or while it ran."""
    asked = request.asked
    what = f"{asked.request_id}: its deadline passed after {now - asked.arrival:.3f} s"
    if request.admitted is None:
        return ExpiredInQueue(f"{what} in the queue, with {num_running} requests running")
    made = sum(sequence.num_generated for sequence in request.sequences)
    return ExpiredInDecode(f"{what}, with {made} tokens generated")
