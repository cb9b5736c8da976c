"""Shows on the standard error how far a command has come: a bar, or lines where nobody looks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

LINE_INTERVAL = 10.0  # seconds
_WIDE = 100  # columns, in which a title has room beside what is being done


class Tell(Protocol):
    """Tells how far a command has come."""

    def __call__(
        self, done: int, total: int, what: str = "", seconds_left: float | None = None
    ) -> None:
        """Show what is being done, how much of it is done, and how long the rest takes."""


def show_progress(
    title: str, interval: float = LINE_INTERVAL
) -> contextlib.AbstractContextManager[Tell]:
    """Show progress while the block runs; it is given what tells of it.

    Without a terminal there is a line every `interval` seconds, whether anything is told or not.
    """
    console = Console(stderr=True)
    return _bar(title, console) if console.is_terminal else _lines(title, console, interval)


@contextlib.contextmanager
def _bar(title: str, console: Console) -> Iterator[Tell]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rest]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        expand=True,
    )

    def tell(done: int, total: int, what: str = "", seconds_left: float | None = None) -> None:
        words = f"{title}, {what}" if what and console.width >= _WIDE else what or title
        rest = "" if seconds_left is None else _more(seconds_left)
        bar.update(task, completed=done, total=total or None, description=words, rest=rest)

    with bar:
        task = bar.add_task(title, total=None, rest="")
        yield tell


@contextlib.contextmanager
def _lines(title: str, console: Console, interval: float) -> Iterator[Tell]:
    started = time.monotonic()
    words, counted, until = title, "", math.nan
    ended = threading.Event()

    def tell(done: int, total: int, what: str = "", seconds_left: float | None = None) -> None:
        nonlocal words, counted, until
        words = f"{title}, {what}" if what else title
        counted = f"{done:,} of {total:,}, " if total else ""
        until = math.nan if seconds_left is None else time.monotonic() + seconds_left

    def print_lines() -> None:
        while not ended.wait(interval):
            now = time.monotonic()
            rest = f"{now - started:.0f} s" if math.isnan(until) else _more(until - now)
            line = f"{words}: {counted}{rest}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def _more(seconds: float) -> str:
    """Return about how long the rest takes, in words."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} seconds more"
    return f"about {round(seconds / 60)} minutes more"
