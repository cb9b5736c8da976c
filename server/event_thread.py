"""A thread that takes events of gRPC, several at a time where there are many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

Event = Any  # cygrpc has no types

_PAUSE = 0.001  # seconds
_AT_ONCE = 0.00005  # seconds in which an event is had that is there already


def start_event_thread(
    name: str, next_event: Callable[[], Event], pass_on: Callable[[Event], bool]
) -> None:
    """Let a thread wait for events and pass them on, until `pass_on` returns False.

    To be woken costs more than most events. So a thread that is woken again soon takes a pause
    behind the event that woke it, and then all that has come meanwhile.
    """
    threading.Thread(target=_follow, args=(next_event, pass_on), name=name, daemon=True).start()


def _follow(next_event: Callable[[], Event], pass_on: Callable[[Event], bool]) -> None:
    woken = 0.0
    while True:
        asked = monotonic()
        event = next_event()
        came = monotonic()
        if not pass_on(event):
            return
        if came - asked > _AT_ONCE:
            is_soon, woken = came - woken < 2 * _PAUSE, came
            if is_soon:
                sleep(_PAUSE)
