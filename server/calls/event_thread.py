"""A thread that takes events of gRPC, several at a time where there are many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep

from server.calls.grpc_core import Event

_PAUSE = 0.001  # seconds
_BACK_OFF = 0.01  # seconds
_AT_ONCE = 0.00005  # seconds in which an event comes that was there before it was waited for


class BackOff:
    """The back-off of a process that refuses most of its calls.

    A call that is refused at once costs most where a worker has had the processor before it, and
    the caches with it. Several at a time cost less, and do not stop the worker for every one. Any
    thread may use it.
    """

    def __init__(self) -> None:
        self._wanted_until = 0.0

    def want(self) -> None:
        """Ask the thread to back off when it has nothing to do."""
        self._wanted_until = monotonic() + _BACK_OFF

    @property
    def is_wanted(self) -> bool:
        """Whether a call was refused of late."""
        return monotonic() < self._wanted_until

    def take(self) -> None:
        """Wait, once."""
        sleep(_BACK_OFF)


def start_event_thread(
    poll: Callable[[float | None], Event],
    pass_on: Callable[[Event], bool],
    back_off: BackOff,
) -> None:
    """Start a thread that takes events and passes them on, until `pass_on` returns False.

    `poll` waits for the next event until a time of the system's clock, None for as long as it
    takes; an event without a tag says that none has come.

    Waking up costs more than most events. So a thread that is woken again soon pauses before it
    waits once more, and then takes all that has come meanwhile; it backs off where that is wanted.
    Either only when nothing is there. How long an event took to come does not show that: another
    thread may have held the interpreter, and backing off then lets calls pile up. One that is not
    woken soon does not look first: that costs as much as a tenth of a message.
    """

    def follow() -> None:
        woken, is_soon, goes_on = 0.0, False, True
        while goes_on:
            event = poll(0) if is_soon or back_off.is_wanted else None
            if event is not None and event.tag is None:
                event = None
                if back_off.is_wanted:
                    back_off.take()
                elif is_soon:
                    sleep(_PAUSE)
            if event is None:
                began, event, came = monotonic(), poll(None), monotonic()
                if came - began > _AT_ONCE:
                    is_soon, woken = came - woken < 2 * _PAUSE, came
            goes_on = pass_on(event)

    threading.Thread(target=follow, name="gRPC calls", daemon=True).start()
