"""Signals that end a command wait until what was measured is put together and written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note the signals that come while the block runs, and do nothing else about them.

    A mask would not do: any other thread would take them, and Python tells the main thread.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # they do not arrive here
        return
    known = {number: signal.getsignal(number) for number in _ENDING}
    before = {one: handler for one, handler in known.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back the first signal that comes in the block until its end."""
    with signals_noted() as noted:
        yield
    for number in noted[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def unheard_by_children() -> Iterator[None]:
    """Block these signals for good in processes that are started in the block.

    A terminal sends Ctrl-C to all of its processes, also to one that has just been started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        # It is started with the first process. It ignores SIGINT and SIGTERM, and ends at a
        # SIGHUP that is not blocked. Its start lets the first two into this thread.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
