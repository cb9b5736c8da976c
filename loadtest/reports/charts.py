"""Draws the pictures of a page, one by one, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest.load_report import LoadReport, Trial
from loadtest.metrics import Distribution
from loadtest.reports.plots import (
    END_TO_END,
    ERROR,
    FIRST_TOKEN,
    INTER_TOKEN,
    draw_course,
    draw_distribution,
    panels_of,
    plain,
    style,
)

_SIZE, _WIDE = (5.2, 3.3), (10.8, 3.3)  # inches
_MAX_POINTS = 2000  # per distribution
_MAX_BINS = 200  # per time series


def charts_of(report: LoadReport) -> list[tuple[str, str]]:
    """Return what each picture shows, and its SVG."""
    found = []
    for name, values, latency, colour in panels_of(report):
        panel = (name, _thinned(values), latency, colour)
        found.append((f"{name}: share of requests or gaps", _svg(_distribution_of(*panel))))
    found.append(("Throughput over time", _svg(lambda axes: _draw_throughput(axes, report))))
    found.append(("Requests in flight over time", _svg(lambda axes: _draw_in_flight(axes, report))))
    if report.server:
        found.append(("The server's batch and queue", _svg(lambda axes: _draw_load(axes, report))))
        found.append(("The server's wasted tokens", _svg(lambda axes: _draw_waste(axes, report))))
    found.append(("Latencies over time", _svg(lambda axes: draw_course(axes, report), _WIDE)))
    return found


def series_chart(trials: Sequence[Trial], bounds: dict[str, float]) -> str:
    """Return latencies against the rate as SVG, with the bounds in seconds."""
    return _svg(lambda axes: draw_series(axes, trials, bounds), _WIDE)


def _svg(draw: Callable[[Axes], None], size: tuple[float, float] = _SIZE) -> str:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "loadtest"}):
        figure = Figure(figsize=size, layout="constrained", dpi=150)
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _distribution_of(
    name: str, values: list[float], latency: Distribution | None, colour: str
) -> Callable[[Axes], None]:
    return lambda axes: draw_distribution(axes, name, values, latency, colour)


def _thinned(values: list[float]) -> list[float]:
    """Return a distribution with few enough points to be drawn."""
    if len(values) <= _MAX_POINTS:
        return values
    return [float(one) for one in np.quantile(values, np.linspace(0, 1, _MAX_POINTS))]


def _end(report: LoadReport) -> float:
    return max((record.finished for record in report.records), default=0.0) or 1.0


def _draw_throughput(axes: Axes, report: LoadReport) -> None:
    end = _end(report)
    num_bins = int(min(_MAX_BINS, max(5, end)))
    good = [record for record in report.records if record.ok]
    ended = [record.finished for record in good]
    width = end / num_bins
    counts, edges = np.histogram(ended, bins=num_bins, range=(0, end))
    _title(axes, "Throughput", "requests/s")
    axes.stairs(counts / width, edges, color=END_TO_END, linewidth=1.8, label="answered")
    bad = [record.finished for record in report.records if not record.ok]
    if bad:
        failed, _ = np.histogram(bad, bins=num_bins, range=(0, end))
        axes.stairs(failed / width, edges, color=ERROR, linewidth=1.8, label="failed")
    if any(record.output_tokens for record in good):
        tokens, _ = np.histogram(
            ended, bins=num_bins, range=(0, end), weights=[r.output_tokens for r in good]
        )
        right = axes.twinx()
        right.stairs(tokens / width, edges, color=INTER_TOKEN, linewidth=1.4, linestyle=":")
        right.set_ylabel("output tokens/s", color="#8a6000")
        right.set_ylim(bottom=0)
        right.spines["top"].set_visible(False)
    _finish(axes, report)


def _draw_in_flight(axes: Axes, report: LoadReport) -> None:
    times = np.array([r.sent for r in report.records] + [r.finished for r in report.records])
    changes = np.repeat([1, -1], len(report.records))
    order = np.lexsort((changes, times))
    _title(axes, "In flight", "requests")
    axes.step(
        times[order], np.cumsum(changes[order]), where="post", color=FIRST_TOKEN, rasterized=True
    )
    _finish(axes, report)


def _draw_load(axes: Axes, report: LoadReport) -> None:
    times = [sample.time for sample in report.server]
    _title(axes, "At the server", "sequences, requests")
    running = [sample.running for sample in report.server]
    waiting = [sample.waiting for sample in report.server]
    axes.step(times, running, where="post", color=END_TO_END, label="batch")
    axes.step(times, waiting, where="post", color=ERROR, label="queue")
    _finish(axes, report)


def _draw_waste(axes: Axes, report: LoadReport) -> None:
    times = np.array([sample.time for sample in report.server])
    wasted = np.array([sample.wasted_tokens for sample in report.server])
    _title(axes, "Wasted at the server", "tokens so far")
    axes.step(times, wasted - wasted[0], where="post", color=ERROR)
    _finish(axes, report)


def draw_series(axes: Axes, trials: Sequence[Trial], bounds: dict[str, float]) -> None:
    """Draw latencies against the rate, with the bounds in seconds."""
    ordered = sorted(trials, key=lambda trial: trial.rate)
    rates = [trial.rate for trial in ordered]
    axes.set_title("Latency against rate", loc="left", fontweight="bold")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("milliseconds")
    style(axes)
    for name, latencies, colour in (
        ("TTFT", [trial.summary.time_to_first_token for trial in ordered], FIRST_TOKEN),
        ("TPOT", [trial.summary.time_per_output_token for trial in ordered], INTER_TOKEN),
        ("end to end", [trial.summary.end_to_end for trial in ordered], END_TO_END),
    ):
        if any(latencies):
            _draw_ends(axes, name, rates, latencies, colour)
    for name, bound in bounds.items():
        axes.axhline(bound * 1000, color=ERROR, linewidth=0.8, linestyle="--")
        axes.annotate(f"{name} bound", (rates[0], bound * 1000), fontsize=8, color=ERROR)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_minor_formatter(NullFormatter())
    # Beside the title, or it hides what is high at a low rate.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, ncols=6, fontsize=8)


def _draw_ends(
    axes: Axes,
    name: str,
    rates: Sequence[float],
    latencies: Sequence[Distribution | None],
    colour: str,
) -> None:
    nan = float("nan")
    p50 = [nan if latency is None else latency.p50 * 1000 for latency in latencies]
    p99 = [nan if latency is None else latency.p99 * 1000 for latency in latencies]
    axes.plot(rates, p50, "o-", color=colour, markersize=4, label=f"{name} p50")
    axes.plot(rates, p99, "s--", color=colour, markersize=4, label=f"{name} p99")


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel(unit)
    style(axes)


def _finish(axes: Axes, report: LoadReport) -> None:
    """Set the limits, and shade what is in no figure."""
    end = _end(report)
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    for start, stop in ((0.0, report.window.start), (report.window.end, end)):
        if stop > start:
            axes.axvspan(start, stop, color="#000000", alpha=0.06, linewidth=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
