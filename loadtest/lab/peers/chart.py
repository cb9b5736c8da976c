"""Draws a comparison: tokens per second of every engine, a panel for each concurrency."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.lab.peers.results import Line, Results, title
from loadtest.lab.peers.works import OURS
from loadtest.reports.plots import write_figure

_OURS = "#0072b2"
_PEER = "#bbbbbb"


def write_png(results: Results, path: Path) -> None:
    """Write one picture."""
    concurrencies = list(dict.fromkeys(line.concurrency for line in results.lines))
    height = 1.9 + 0.32 * len({line.engine for line in results.lines})
    figure = Figure(figsize=(4.6 * len(concurrencies) + 1, height), layout="constrained", dpi=120)
    machine = f"{results.heading['machine']}, {results.num_threads} threads"
    figure.suptitle(f"{title(results.work)}\n{machine}", fontsize=10)
    for column, concurrency in enumerate(concurrencies):
        axes = figure.add_subplot(1, len(concurrencies), column + 1)
        _draw(axes, concurrency, [x for x in results.lines if x.concurrency == concurrency])
    write_figure(figure, path)


def _draw(axes: Axes, concurrency: int, lines: list[Line]) -> None:
    axes.set_title(f"{concurrency} at once", loc="left", fontweight="bold")
    axes.set_xlabel("new tokens per second, prompts included")
    names = [line.engine for line in lines]
    colours = [_OURS if line.engine.startswith(OURS) else _PEER for line in lines]
    bars = axes.barh(names, [line.tokens_per_second for line in lines], color=colours)
    labels = [
        f"{line.tokens_per_second:.0f}"
        + (f"  (ours: {line.ratio.median:.2f} times)" if line.ratio else "")
        for line in lines
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(line.tokens_per_second for line in lines))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
