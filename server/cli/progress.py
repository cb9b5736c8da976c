"""Shows on the standard error how far a command has come: a bar, or lines where nobody looks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

LINE_INTERVAL = 10.0  # seconds


def show_progress(
    title: str, interval: float = LINE_INTERVAL
) -> contextlib.AbstractContextManager[Callable[[int, int], None]]:
    """Show progress while the block runs; it is given what tells of it: done, total.

    Without a terminal there is a line every `interval` seconds, whether anything is told or not.
    """
    console = Console(stderr=True)
    return _bar(title, console) if console.is_terminal else _lines(title, console, interval)


@contextlib.contextmanager
def _bar(title: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _lines(title: str, console: Console, interval: float) -> Iterator[Callable[[int, int], None]]:
    started = time.monotonic()
    told = ""
    ended = threading.Event()

    def tell(done: int, total: int) -> None:
        nonlocal told
        told = f"{done:,} of {total:,}, "

    def print_lines() -> None:
        while not ended.wait(interval):
            line = f"{title}: {told}{time.monotonic() - started:.0f} s"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
