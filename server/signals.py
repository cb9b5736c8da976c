"""Turns signals that end a command into the end of a block, whose `finally`s drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """End the block at SIGTERM, SIGINT or SIGHUP; yield the signals seen so far.

    Its work is cancelled, and the code behind it goes on. SIGHUP, which a closed terminal
    sends, stays ignored under nohup. A second signal cancels again, which interrupts a drain that
    takes too long; a third one finds no handler any more, and kills.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "entered outside of a task"
    seen: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        seen.append(number)
        task.cancel()
        if len(seen) == 2:
            remove_handlers()

    def remove_handlers() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield seen
    except asyncio.CancelledError:
        if not seen:
            raise
    finally:
        remove_handlers()
