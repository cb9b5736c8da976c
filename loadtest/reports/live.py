"""Shows a load test while it runs: a table in a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.config import LoadConfig
from loadtest.metrics import RequestRecord
from loadtest.runner import Course, Watch

_RECENT = 5.0  # seconds of which figures are shown
_LABEL_WIDTH, _NUMBER_WIDTH = 12, 7  # the same all the time, or the table jumps
LINE_INTERVAL = 10.0  # seconds between lines where there is no terminal


@dataclass
class Figures:
    """Figures of a course, computed from the requests that ended since the last look."""

    clock: Callable[[], float] = time.monotonic
    num_ended: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_in_flight: int = 0
    recent: list[tuple[float, RequestRecord]] = field(default_factory=list)  # each with its time
    started: float | None = None

    def look(self, course: Course) -> None:
        """Take what has ended since the last look."""
        now = self.clock()
        self.started = now if self.started is None else self.started
        new = course.records[self.num_ended :]
        self.num_ended += len(new)
        self.num_failed += sum(not record.ok for record in new)
        self.num_tokens += sum(record.output_tokens for record in new)
        self.num_in_flight = course.num_in_flight
        self.recent = [seen for seen in self.recent if seen[0] > now - _RECENT]
        self.recent += [(now, record) for record in new]

    @property
    def elapsed(self) -> float:
        return 0.0 if self.started is None else self.clock() - self.started

    @property
    def span(self) -> float:
        """Seconds that the recent records are of."""
        return max(1e-9, min(self.elapsed, _RECENT))

    @property
    def rate(self) -> float:
        """Requests answered a second, of late."""
        return sum(record.ok for _, record in self.recent) / self.span

    @property
    def tokens_per_second(self) -> float:
        return sum(record.output_tokens for _, record in self.recent) / self.span

    def latencies(self) -> dict[str, list[str]]:
        """Return p50, p90 and p99 of the latencies of late, in milliseconds, by their names."""
        good = [record for _, record in self.recent if record.ok]
        return {
            "TTFT": _percentiles([record.time_to_first_token for record in good]),
            "ITL": _percentiles([gap for record in good for gap in record.inter_token_latencies]),
            "end to end": _percentiles([record.end_to_end for record in good]),
        }


@contextlib.contextmanager
def shown(config: LoadConfig, console: Console | None = None) -> Iterator[Watch]:
    """Show a load test while the block runs; it is given what is to be called with its course."""
    console = console or Console(stderr=True)
    figures = Figures()
    if not console.is_terminal:
        yield _line_by_line(config, figures, console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(course: Course) -> None:
            figures.look(course)
            live.update(table(config, figures), refresh=True)

        yield show


def table(config: LoadConfig, figures: Figures) -> RenderableType:
    """Return what is shown: 40 columns, so that it stays whole where a terminal is made smaller."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(min_width=_LABEL_WIDTH, no_wrap=True)
    for _ in range(3):
        made.add_column(min_width=_NUMBER_WIDTH, justify="right", no_wrap=True)
    errors = Text(f"{figures.num_failed:,}", "bold red" if figures.num_failed else "")
    recent_errors = sum(not record.ok for _, record in figures.recent)
    elapsed = max(figures.elapsed, 1e-9)
    rate = (figures.num_ended - figures.num_failed) / elapsed
    tokens = figures.num_tokens / elapsed
    made.add_row("", f"last {_RECENT:g} s", "so far", style="bold")
    made.add_row("requests/s", f"{figures.rate:.1f}", f"{rate:.1f}")
    made.add_row("tokens/s", f"{figures.tokens_per_second:,.0f}", f"{tokens:,.0f}")
    made.add_row("errors", f"{recent_errors:,}", errors)
    made.add_row("in flight", f"{figures.num_in_flight:,}")
    made.add_row(f"last {_RECENT:g} s, ms", "p50", "p90", "p99", style="bold")
    for name, values in figures.latencies().items():
        made.add_row(name, *values)
    title = Text(f"{config.model}: {config.arrival}", "bold", overflow="ellipsis", no_wrap=True)
    return Group(title, Text(_progress(config, figures)), made)


def _progress(config: LoadConfig, figures: Figures) -> str:
    """Return how far the test has come, and where it ends."""
    duration, most = config.duration, config.num_requests
    end = "" if duration is None else f" of {duration:g}"
    of_all = "" if duration is not None or most is None else f" of {most:,}"
    return f"{figures.elapsed:.0f}{end} s, {figures.num_ended:,}{of_all} requests"


def _line_by_line(config: LoadConfig, figures: Figures, console: Console) -> Watch:
    told = figures.clock()

    def show(course: Course) -> None:
        nonlocal told
        figures.look(course)
        if figures.clock() - told < LINE_INTERVAL:
            return
        told = figures.clock()
        line = (
            f"{config.model}: {_progress(config, figures)}, "
            f"{figures.num_failed:,} failed, {figures.num_in_flight:,} in flight, "
            f"{figures.rate:.1f}/s"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show


def _percentiles(values: list[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    found = np.percentile(known, [50, 90, 99]) * 1000
    return [f"{value:.1f}" if value < 1000 else f"{value:,.0f}" for value in found]
