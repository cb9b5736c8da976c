"""Work that a signal may not cut off; commands without any end at once (server.cli.main)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from click.exceptions import Exit

_MOMENT = 1.5  # seconds in which an interrupted computation may end by itself
_ENDING = tuple(bytes([number]) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


class Interruption:
    """Which signal has ended the work, if one has."""

    def __init__(self) -> None:
        self.signal = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """The exit code that shells report of a command that a signal has ended."""
        return 128 + self.signal


@contextlib.contextmanager
def cleaned_up() -> Iterator[Interruption]:
    """Turn the signals into KeyboardInterrupt in the block, so that its `finally`s run.

    Then the command ends with 128 + the signal's number. asyncio makes the interrupt of SIGINT a
    cancellation; whoever handles that one handles the others.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # signals do not arrive here
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        interruption.signal = signal.Signals(number)
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = {
        signal.SIGINT: _handle(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: _handle(signal.SIGTERM, interrupt),
        signal.SIGHUP: _handle(signal.SIGHUP, interrupt),
    }
    try:
        yield interruption
    except KeyboardInterrupt:
        raise Exit(interruption.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ended_soon(last_word: str, clean_up: Callable[[], None]) -> Iterator[None]:
    """End the process where a signal finds the block in a computation that lasts.

    It has a moment to end by itself, as `cleaned_up` lets it; `last_word` is printed either way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not arrive here
        return
    ended, (ours, theirs) = threading.Event(), socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        with ours:
            while arrived := ours.recv(1):
                if arrived in _ENDING and not ended.wait(_MOMENT):
                    print(last_word, file=sys.stderr, flush=True)
                    clean_up()
                    os._exit(128 + arrived[0])

    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="interruption", daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        ended.set()
        print(last_word, file=sys.stderr, flush=True)
        raise
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        theirs.close()  # ends the thread


def _handle(number: signal.Signals, handler: signal._HANDLER) -> signal._HANDLER:
    """Set the handler of a signal unless it is ignored, as under nohup; return what it was."""
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, handler)
    return before
