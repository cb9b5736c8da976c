"""Shows how a training run goes: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

LINE_INTERVAL = 10.0  # seconds between plain lines


class TrainingProgress(Protocol):
    """Shows how a run goes on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def step(self, step: int, loss: float, num_tokens: int) -> None:
        """Tell that update number `step` is done; `num_tokens` were in its batch."""

    def say(self, message: str) -> None:
        """Show a line that stays."""


def make_progress(
    enabled: bool, title: str, steps: int, first_step: int, console: Console | None = None
) -> TrainingProgress:
    """Return the progress display that suits where the output goes."""
    console = (console or Console()) if enabled else Console(quiet=True)
    if enabled and console.is_terminal:
        return BarProgress(console, title, steps, first_step)
    return LineProgress(console, title, steps)


class BarProgress:
    """A bar with the loss, tokens a second and the time left."""

    def __init__(self, console: Console, title: str, steps: int, first_step: int) -> None:
        self._meter = _Meter(time.monotonic)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),  # the only one that a narrow terminal makes narrower
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
        )
        self._task: TaskID = self._bar.add_task(
            title, total=steps, completed=first_step, loss="-", speed="-"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        self._meter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, num_tokens: int) -> None:
        """Move the bar."""
        self._meter.add(loss, num_tokens)
        self._bar.update(
            self._task,
            completed=step,
            loss=f"{self._meter.loss:.4f}",
            speed=f"{self._meter.tokens_per_second:,.0f}",
        )

    def say(self, message: str) -> None:
        """Print above the bar."""
        self._bar.console.print(message, markup=False, highlight=False)


class LineProgress:
    """A line every ten seconds."""

    def __init__(
        self,
        console: Console,
        title: str,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._clock = clock
        self._meter = _Meter(clock)
        self._last_line = clock()

    def __enter__(self) -> Self:
        self._meter.start()
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: int, loss: float, num_tokens: int) -> None:
        """Print a line if the last one is old, or this is the end."""
        self._meter.add(loss, num_tokens)
        if self._clock() - self._last_line < LINE_INTERVAL and step != self._steps:
            return
        self._last_line = self._clock()
        left = self._meter.seconds_a_step * (self._steps - step)
        shown = f"  {left / 60:.0f} min left" if left >= 90 else f"  {left:.0f} s left"
        self.say(
            f"{self._title}: step {step}/{self._steps}  loss {self._meter.loss:.4f}  "
            f"{self._meter.tokens_per_second:,.0f} tokens/s" + (shown if left else "")
        )

    def say(self, message: str) -> None:
        """Print the line."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


class _Meter:
    """A smoothed loss and the speed since the start."""

    SMOOTHING = 0.98  # weight of the past; about the last 50 steps count

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._tokens = 0
        self._steps = 0
        self.loss = 0.0

    def start(self) -> None:
        self._started = self._clock()

    def add(self, loss: float, num_tokens: int) -> None:
        past = min(self.SMOOTHING, self._steps / (self._steps + 5))  # the first counts little soon
        self.loss = past * self.loss + (1 - past) * loss
        self._steps += 1
        self._tokens += num_tokens

    @property
    def seconds_a_step(self) -> float:
        return (self._clock() - self._started) / self._steps

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / max(self._clock() - self._started, 1e-9)
