"""Shows a load test while it runs: a table in a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.metrics import RequestRecord
from loadtest.runner import Course, Watch

_RECENT = 5.0  # seconds of which figures are shown
LINE_INTERVAL = 10.0  # seconds between lines where there is no terminal


@dataclass
class Figures:
    """What is shown of a course, computed from what ended since the last look."""

    clock: Callable[[], float] = time.monotonic
    num_ended: int = 0
    num_failed: int = 0
    num_in_flight: int = 0
    recent: list[tuple[float, RequestRecord]] = field(default_factory=list)  # with when it was seen
    started: float | None = None

    def look(self, course: Course) -> None:
        """Take what has ended since the last look."""
        now = self.clock()
        self.started = now if self.started is None else self.started
        new = course.records[self.num_ended :]
        self.num_ended += len(new)
        self.num_failed += sum(not record.ok for record in new)
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

    def first_token(self) -> str:
        """Percentiles of the time to the first token, of late."""
        return _percentiles([r.time_to_first_token for _, r in self.recent if r.ok])

    def inter_token(self) -> str:
        """Percentiles of the time between tokens, of late."""
        return _percentiles([gap for _, r in self.recent for gap in r.inter_token_latencies])

    def end_to_end(self) -> str:
        """Percentiles of the time to the end, of late."""
        return _percentiles([r.end_to_end for _, r in self.recent if r.ok])


@contextlib.contextmanager
def shown(title: str, console: Console | None = None) -> Iterator[Watch]:
    """Show a load test while the block runs; it is given what is to be called with its course."""
    console = console or Console(stderr=True)
    figures = Figures()
    if not console.is_terminal:
        yield _line_by_line(title, figures, console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(course: Course) -> None:
            figures.look(course)
            live.update(table(title, figures), refresh=True)

        yield show


def table(title: str, figures: Figures) -> RenderableType:
    """Return what is shown: at most 80 columns wide."""
    made = Table(
        title=Text(f"{title}, {figures.elapsed:.0f} s"),
        title_justify="left",
        title_style="bold",
        min_width=60,
    )
    made.add_column("", style="bold", no_wrap=True)
    made.add_column(f"last {_RECENT:g} s", justify="right")
    made.add_column("so far", justify="right")
    errors = Text(f"{figures.num_failed:,}", "bold red" if figures.num_failed else "")
    recent_errors = sum(not record.ok for _, record in figures.recent)
    rate = (figures.num_ended - figures.num_failed) / max(figures.elapsed, 1e-9)
    made.add_row("answered a second", f"{figures.rate:.1f}", f"{rate:.1f}")
    made.add_row("tokens a second", f"{figures.tokens_per_second:,.0f}", "")
    made.add_row("in flight", f"{figures.num_in_flight:,}", "")
    made.add_row("errors", f"{recent_errors:,}", errors)
    made.add_row("ended", f"{len(figures.recent):,}", f"{figures.num_ended:,}")
    made.add_row("TTFT p50, p90, p99 ms", figures.first_token(), "")
    made.add_row("ITL p50, p90, p99 ms", figures.inter_token(), "")
    made.add_row("end to end p50, p90, p99 ms", figures.end_to_end(), "")
    return made


def _line_by_line(title: str, figures: Figures, console: Console) -> Watch:
    told = figures.clock()

    def show(course: Course) -> None:
        nonlocal told
        figures.look(course)
        if figures.clock() - told < LINE_INTERVAL:
            return
        told = figures.clock()
        line = (
            f"{title}: {figures.elapsed:.0f} s, {figures.num_ended:,} ended, "
            f"{figures.num_failed:,} failed, {figures.num_in_flight:,} in flight, "
            f"{figures.rate:.1f}/s"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show


def _percentiles(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    found = np.percentile(known, [50, 90, 99]) * 1000
    return "  ".join(f"{value:.1f}" if value < 1000 else f"{value:.0f}" for value in found)
