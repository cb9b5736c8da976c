"""Draws the latencies of a load test."""

from __future__ import annotations

import io
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest.load_report import LoadReport
from loadtest.metrics import Distribution, due_in
from loadtest.result_file import write_atomically

FIRST_TOKEN = "#0072b2"
INTER_TOKEN = "#e69f00"
END_TO_END = "#009e73"
ERROR = "#d55e00"
_GRID = "#dddddd"


def write_png(report: LoadReport, path: Path) -> None:
    """Write one picture: distributions of the latencies above, the course of the test below."""
    figure = Figure(figsize=(13, 8.5), layout="constrained", dpi=120)
    figure.suptitle(_title(report), fontsize=13, linespacing=1.5)
    panels = panels_of(report)
    grid = figure.add_gridspec(2, len(panels), height_ratios=(1, 1.1))
    for column, (name, values, latency, colour) in enumerate(panels):
        draw_distribution(figure.add_subplot(grid[0, column]), name, values, latency, colour)
    draw_course(figure.add_subplot(grid[1, :]), report)
    write_figure(figure, path)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a picture, all or nothing."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


Panel = tuple[str, list[float], Distribution | None, str]


def panels_of(report: LoadReport) -> list[Panel]:
    """Return the latencies to draw: name, values in seconds, statistics, colour."""
    good = [record for record in due_in(report.records, report.window) if record.ok]
    summary = report.summary
    first = [r.time_to_first_token for r in good if r.time_to_first_token is not None]
    gaps = [gap for record in good for gap in record.inter_token_latencies]
    end_to_end = [record.end_to_end for record in good]
    panels: list[Panel] = [("End to end", end_to_end, summary.end_to_end, END_TO_END)]
    if report.method != "generate" and not first:
        return panels
    return [
        ("Time to first token", first, summary.time_to_first_token, FIRST_TOKEN),
        ("Inter-token latency", gaps, summary.inter_token_latency, INTER_TOKEN),
        *panels,
    ]


def _title(report: LoadReport) -> str:
    summary = report.summary
    second = f"{summary.num_ok} of {summary.num_due} requests answered in "
    second += f"{summary.duration:.1f} s: {summary.requests_per_second:.1f} requests/s"
    if report.method == "generate":
        second += f", {summary.output_tokens_per_second:.0f} output tokens/s"
    return f"Load test of {report.config.model}: {report.config.arrival}\n{second}"


def draw_distribution(
    axes: Axes, name: str, values: list[float], latency: Distribution | None, colour: str
) -> None:
    """Draw the share of values up to each latency, with the percentiles marked."""
    axes.set_title(name, loc="left", fontweight="bold")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of requests" if name != "Inter-token latency" else "share of gaps")
    axes.set_ylim(0, 1.02)
    style(axes)
    if latency is None:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color="grey")
        return
    milliseconds = [max(value * 1000, 0.01) for value in values]  # a logarithm needs a value
    axes.ecdf(milliseconds, color=colour, linewidth=2)
    decades = math.log10(max(milliseconds) / min(milliseconds))
    if decades > 1:  # within one a logarithm has few numbers to be labelled with
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
        axes.xaxis.set_minor_formatter(
            FuncFormatter(plain_minor) if decades < 2.5 else NullFormatter()
        )
    for share, label, value in (
        (0.5, "p50", latency.p50),
        (0.9, "p90", latency.p90),
        (0.99, "p99", latency.p99),
    ):
        axes.plot(max(value * 1000, 0.01), share, "o", color=colour, markersize=5)
        axes.annotate(
            f"{label} {plain(value * 1000)}",
            (max(value * 1000, 0.01), share),
            xytext=(-7, 2) if share > 0.6 else (7, -10),
            textcoords="offset points",
            ha="right" if share > 0.6 else "left",
            fontsize=9,
            color="#333333",
        )


def draw_course(axes: Axes, report: LoadReport) -> None:
    """Draw the latencies of every request over the time at which it was due."""
    axes.set_title("Course of the test", loc="left", fontweight="bold")
    axes.set_xlabel("seconds from the start, when a request was due")
    axes.set_ylabel("milliseconds")
    style(axes)
    good = [record for record in report.records if record.ok]
    bad = [record for record in report.records if not record.ok]
    first = [r for r in good if r.time_to_first_token is not None]
    for name, records, latencies, colour in (
        ("end to end", good, [r.end_to_end for r in good], END_TO_END),
        ("first token", first, [r.time_to_first_token or 0.0 for r in first], FIRST_TOKEN),
        ("failed, until the error", bad, [r.end_to_end for r in bad], ERROR),
    ):
        if records:
            axes.scatter(
                [record.scheduled for record in records],
                [latency * 1000 for latency in latencies],
                s=18,
                marker="x" if name.startswith("failed") else "o",
                color=colour,
                alpha=0.75,
                linewidths=1.2 if name.startswith("failed") else 0,
                rasterized=True,
                label=f"{name} ({len(records)})",
            )
    longest = max((record.end_to_end for record in report.records), default=0.0)
    axes.set_ylim(0, 1050 * (longest or 1.0))
    if report.records:
        axes.legend(loc="upper left", frameon=False, ncols=3, bbox_to_anchor=(0.2, 1.12))


def style(axes: Axes) -> None:
    """Draw a quiet grid, and no frame above and at the right."""
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plain(value: float, _position: int | None = None) -> str:
    """Return a number as a person writes it."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def plain_minor(value: float, _position: int | None = None) -> str:
    """Label 2 and 5 between the powers of ten."""
    return plain(value) if f"{value:e}"[0] in "25" else ""
