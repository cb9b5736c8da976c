"""A thread that takes events of gRPC, several at a time where there are many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

Event = Any  # cygrpc has no types

_PAUSE = 0.001  # seconds
_REST = 0.01  # seconds
_AT_ONCE = 0.00005  # seconds in which an event is had that is there already


class Rests:
    """The rests of a process that refuses most of its calls; its threads wake at the same moments.

    A call that is refused at once costs most where a worker has had the processor before it, and
    the caches with it. Several at a time cost less, and do not stop the worker for every one. Any
    thread may use it.
    """

    def __init__(self) -> None:
        self._wanted_until = 0.0

    def want(self) -> None:
        """Let threads rest that have nothing to do in this moment."""
        self._wanted_until = monotonic() + _REST

    @property
    def are_wanted(self) -> bool:
        """Whether a call was refused of late."""
        return monotonic() < self._wanted_until

    def take(self) -> None:
        """Rest until the next moment at which all wake."""
        sleep(_REST - monotonic() % _REST)


def start_event_thread(
    name: str,
    next_event: Callable[[], Event],
    pass_on: Callable[[Event], bool],
    rests: Rests,
    *,
    pauses: bool = True,
) -> None:
    """Let a thread wait for events and pass them on, until `pass_on` returns False.

    To be woken costs more than most events. So a thread that is woken again soon takes a pause
    behind the event that woke it, and then all that has come meanwhile; it rests where rests are
    wanted. Without `pauses` it does not wait for more: what comes to it is joined already.
    """
    thread = threading.Thread(
        target=_follow, args=(next_event, pass_on, rests, pauses), name=name, daemon=True
    )
    thread.start()


def _follow(
    next_event: Callable[[], Event], pass_on: Callable[[Event], bool], rests: Rests, pauses: bool
) -> None:
    woken = 0.0
    while True:
        asked = monotonic()
        event = next_event()
        came = monotonic()
        if not pass_on(event):
            return
        if came - asked > _AT_ONCE:
            is_soon, woken = came - woken < 2 * _PAUSE, came
            if rests.are_wanted:
                rests.take()
            elif is_soon and pauses:
                sleep(_PAUSE)
