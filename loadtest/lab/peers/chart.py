"""Draws a comparison: the speed of every engine relative to the fastest other one, sorted.

Engines are grouped by their weights: those of 8 bits are compared with others of 8 bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel

from loadtest.lab.peers.works import MODELS, OURS
from loadtest.lab.turns import Ratio
from loadtest.reports.plots import END_TO_END, FIRST_TOKEN, INTER_TOKEN, style, write_figure

_COLOURS = (FIRST_TOKEN, INTER_TOKEN, END_TO_END)
_OVER_LINE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
_GROUP = 0.8  # height of the bars of an engine; the rest of 1 is between engines


class _Line(BaseModel):
    engine: str
    against: str | None  # the engine of ours with the same weights; None: it is ours
    concurrency: int
    ratio: Ratio | float | None  # its time over ours; files of 2026 up to November have the median


class _Work(BaseModel):
    name: str
    model: str
    num_prompt_tokens: int
    num_new_tokens: int
    num_beams: int = 1


class Document(BaseModel):
    """A result of the study, as its JSON has it."""

    work: _Work
    machine: str
    num_threads: int
    lines: tuple[_Line, ...]


class Speed(NamedTuple):
    """Speed of an engine at one concurrency, in times that of the fastest other engine."""

    engine: str
    concurrency: int
    value: float


def relative_speeds(lines: Iterable[_Line]) -> list[list[Speed]]:
    """Return the speeds of every group of engines, the fastest engine first in each."""
    groups: dict[str, dict[int, dict[str, float]]] = {}
    for line in lines:
        if line.against is not None and line.ratio is not None:
            ratio = line.ratio.median if isinstance(line.ratio, Ratio) else line.ratio
            group = groups.setdefault(line.against, {})
            group.setdefault(line.concurrency, {})[line.engine] = ratio
    return [_sorted(_speeds(ours, group)) for ours, group in groups.items()]


def write_png(result: Path, picture: Path) -> None:
    """Draw a result of the study, which is a JSON file."""
    document = Document.model_validate_json(result.read_text())
    groups = relative_speeds(document.lines)
    num_engines = sum(len({speed.engine for speed in group}) for group in groups)
    figure = Figure(figsize=(8, 1.7 + 0.42 * num_engines), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    work, threads = document.work, document.num_threads
    figure.suptitle(
        f"{MODELS[work.model]} on {threads} CPU core{'s' * (threads > 1)}: "
        "speed relative to the fastest other engine",
        fontsize=12,
        fontweight="bold",
    )
    kind = f"beam {work.num_beams}" if work.num_beams > 1 else "greedy"
    axes.set_title(
        f"{work.num_prompt_tokens} tokens in, {work.num_new_tokens} out, {kind}; "
        f"{document.machine.partition(',')[0]}; longer is faster",
        fontsize=9.5,
        color="#555555",
    )
    _draw(axes, groups)
    write_figure(figure, picture)


def _speeds(ours: str, ratios: dict[int, dict[str, float]]) -> Iterable[Speed]:
    for concurrency, by_engine in ratios.items():
        fastest = min(by_engine.values())
        yield Speed(ours, concurrency, fastest)
        for engine, ratio in by_engine.items():
            yield Speed(engine, concurrency, fastest / ratio)


def _sorted(speeds: Iterable[Speed]) -> list[Speed]:
    found = list(speeds)
    mean = {
        engine: statistics.fmean(one.value for one in found if one.engine == engine)
        for engine in {one.engine for one in found}
    }
    return sorted(found, key=lambda one: (-mean[one.engine], one.engine, one.concurrency))


def _draw(axes: Axes, groups: Sequence[Sequence[Speed]]) -> None:
    concurrencies = sorted({speed.concurrency for group in groups for speed in group})
    height = _GROUP / len(concurrencies)
    places: dict[str, float] = {}
    for number, group in enumerate(groups):
        for engine in dict.fromkeys(speed.engine for speed in group):
            places[engine] = len(places) + 0.5 * number
    speeds = {(one.engine, one.concurrency): one.value for group in groups for one in group}
    for row, concurrency in enumerate(concurrencies):
        offset = (row - (len(concurrencies) - 1) / 2) * height
        bars = axes.barh(
            [place + offset for place in places.values()],
            [speeds.get((engine, concurrency), 0.0) for engine in places],
            height=0.92 * height,
            color=_COLOURS[row % len(_COLOURS)],
            label=f"{concurrency} at once",
        )
        labels = [
            f"{speeds[engine, concurrency]:.2f}"
            if (engine, concurrency) in speeds
            else "not measured"
            for engine in places
        ]
        axes.bar_label(bars, labels, padding=3, fontsize=8, color="#333333", bbox=_OVER_LINE)
    axes.axvline(1.0, color="#333333", linewidth=1.2)
    axes.set_yticks(list(places.values()), list(places))
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.set_xlim(0, 1.12 * max(speeds.values()))
    style(axes)
    axes.grid(False, axis="y")
    axes.legend(loc="lower right", frameon=False, fontsize=10)
