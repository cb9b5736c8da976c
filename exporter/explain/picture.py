"""Draws attention heads: a panel for each head, a row of panels for each layer."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches; labels stay readable because the figure grows with the text, not the other way round.
_CELL = 0.125  # a token in a panel
_MIN_PANEL = 1.4
_MAX_TOKENS = 48  # in a panel with labels on all of them; longer texts get every n-th
_CHARACTER = 0.062  # a character of a label
_TITLE = 0.28  # above a panel
_CAPTION = 0.4
_BLOCK_TITLE = 0.2
_BLOCK_GAP = 0.3
_GAP = 0.18
_MARGIN = 0.25
_FONT_SIZE = 7  # points
_MAX_LABEL = 14  # characters
_MAX_CAPTION = 110  # characters
_DPI = 150
_MAX_PIXELS = 10_000  # width, or height
_RED = (0.85, 0.1, 0.1)


@dataclass(frozen=True)
class TextBlock:
    """The heads of one kind of attention: queries are rows of a panel, keys its columns."""

    title: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: NDArray[np.float32]  # (num_layers, num_heads, len(queries), len(keys))


@dataclass(frozen=True)
class ImageBlock:
    """The heads of a vision model: how much the class token attends to each patch."""

    title: str
    image: NDArray[np.float32]  # (size, size), gray, from 0 to 1
    weights: NDArray[np.float32]  # (num_layers, num_heads, patches in a column, patches in a row)


@dataclass(frozen=True)
class _Grid:
    """The layout of the panels of a block, in inches."""

    width: float  # each panel's
    height: float
    left: float  # room for the labels of the queries
    below: float  # room for the labels of the keys
    num_rows: int
    num_columns: int

    @property
    def total_width(self) -> float:
        return self.num_columns * (self.left + self.width + _GAP) + 0.8  # a colour bar

    @property
    def total_height(self) -> float:
        panels = self.num_rows * (_TITLE + self.height + self.below + _GAP)
        return _BLOCK_TITLE + panels + _BLOCK_GAP


def draw(caption: str, blocks: Sequence[TextBlock | ImageBlock]) -> bytes:
    """Return a PNG of the blocks below one another, under a caption."""
    from matplotlib.figure import Figure

    grids = [_grid(block) for block in blocks]
    width = max(grid.total_width for grid in grids) + 2 * _MARGIN
    width = max(width, _CHARACTER * 1.6 * min(len(caption), _MAX_CAPTION))
    height = sum(grid.total_height for grid in grids) + 2 * _MARGIN + _CAPTION
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height - _MARGIN
    _write(figure, _MARGIN, top, _clip(caption, _MAX_CAPTION), size=11, weight="bold")
    top -= _CAPTION
    for block, grid in zip(blocks, grids, strict=True):
        _draw_block(figure, block, grid, top)
        top -= grid.total_height
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=min(_DPI, _MAX_PIXELS / max(width, height)))
    return buffer.getvalue()


def _grid(block: TextBlock | ImageBlock) -> _Grid:
    num_layers, num_heads = block.weights.shape[:2]
    if isinstance(block, ImageBlock):
        return _Grid(_MIN_PANEL, _MIN_PANEL, 0.0, 0.0, num_layers, num_heads)
    return _Grid(
        width=_panel_side(block.keys),
        height=_panel_side(block.queries),
        left=_label_room(block.queries),
        below=_label_room(block.keys),
        num_rows=num_layers,
        num_columns=num_heads,
    )


def _panel_side(tokens: Sequence[str]) -> float:
    return max(_MIN_PANEL, _CELL * min(len(tokens), _MAX_TOKENS))


def _label_room(tokens: Sequence[str]) -> float:
    return 0.1 + _CHARACTER * max(len(_clip(token, _MAX_LABEL)) for token in tokens)


def _draw_block(figure: Figure, block: TextBlock | ImageBlock, grid: _Grid, top: float) -> None:
    _write(figure, _MARGIN, top, block.title, size=9)
    top -= _BLOCK_TITLE
    highest = float(block.weights.max()) or 1.0
    panel_top = top
    for layer in range(grid.num_rows):
        panel_top -= _TITLE
        for head in range(grid.num_columns):
            left = _MARGIN + head * (grid.left + grid.width + _GAP) + grid.left
            axes = _axes(figure, left, panel_top - grid.height, grid.width, grid.height)
            title = f"layer {layer + 1}, head {head + 1}"
            axes.set_title(title, fontsize=_FONT_SIZE + 1, pad=3, loc="left")
            if isinstance(block, TextBlock):
                _draw_text_panel(axes, block, grid, block.weights[layer, head], highest)
            else:
                _draw_image_panel(axes, block, block.weights[layer, head], highest)
        panel_top -= grid.height + grid.below + _GAP
    _draw_colour_bar(figure, block, grid, top - _TITLE, highest)


def _draw_text_panel(
    axes: Axes, block: TextBlock, grid: _Grid, weights: NDArray[np.float32], highest: float
) -> None:
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
    num_queries, num_keys = weights.shape
    lines: dict[str, Any] = {"colors": "0.9", "linewidths": 0.3}
    axes.hlines(np.arange(num_queries - 1) + 0.5, -0.5, num_keys - 0.5, **lines)
    axes.vlines(np.arange(num_keys - 1) + 0.5, -0.5, num_queries - 0.5, **lines)
    # As plain text: tick objects take five times longer.
    axes.set_xticks([])
    axes.set_yticks([])
    font: dict[str, Any] = {"fontsize": _FONT_SIZE, "parse_math": False}
    beside, under = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    gap = 0.03  # inches
    for i, token in _labelled(block.queries):
        font |= {"ha": "right", "va": "center_baseline", "transform": beside}
        axes.text(-gap / grid.width, i, token, **font)
    for i, token in _labelled(block.keys):
        font |= {"ha": "center", "va": "top", "rotation": 90, "transform": under}
        axes.text(i, -gap / grid.height, token, **font)
    _soften(axes)


def _labelled(tokens: Sequence[str]) -> Iterator[tuple[int, str]]:
    for i in range(0, len(tokens), -(-len(tokens) // _MAX_TOKENS)):
        yield i, _printable(_clip(tokens[i], _MAX_LABEL))


def _draw_image_panel(
    axes: Axes, block: ImageBlock, weights: NDArray[np.float32], highest: float
) -> None:
    size = block.image.shape[0]
    extent = (0.0, float(size), float(size), 0.0)
    axes.imshow(block.image, cmap="gray", vmin=0, vmax=1, extent=extent)
    # The more attention, the less of the image shows through.
    opacity = np.clip(weights / highest, 0, 1)
    red = np.dstack([np.broadcast_to(channel, weights.shape) for channel in _RED] + [opacity])
    axes.imshow(red, extent=extent, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    _soften(axes)


def _draw_colour_bar(
    figure: Figure, block: TextBlock | ImageBlock, grid: _Grid, top: float, highest: float
) -> None:
    from matplotlib.colors import Colormap, LinearSegmentedColormap

    left = _MARGIN + grid.num_columns * (grid.left + grid.width + _GAP)
    axes = _axes(figure, left, top - _MIN_PANEL, 0.12, _MIN_PANEL)
    cmap: str | Colormap = "Blues"
    if isinstance(block, ImageBlock):
        cmap = LinearSegmentedColormap.from_list("attention", [(1.0, 1.0, 1.0), _RED])
    ramp = np.linspace(0, highest, 128)[:, None]
    axes.imshow(ramp, cmap=cmap, aspect="auto", origin="lower", extent=(0, 1, 0, highest))
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_yticks([0, highest], labels=["0", f"{highest:.2g}"], fontsize=_FONT_SIZE)
    axes.tick_params(length=0, pad=2)
    _soften(axes)


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    total_width, total_height = figure.get_size_inches()
    return figure.add_axes(
        (left / total_width, bottom / total_height, width / total_width, height / total_height)
    )


def _write(
    figure: Figure, left: float, top: float, text: str, *, size: int, weight: str = "normal"
) -> None:
    width, height = figure.get_size_inches()
    figure.text(
        left / width,
        top / height,
        _printable(text),
        fontsize=size,
        fontweight=weight,
        va="top",
        parse_math=False,
    )


def _soften(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_color("0.7")
        spine.set_linewidth(0.5)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _printable(text: str) -> str:
    """Replace what the font has no glyph for, as of many scripts, by its code point."""
    known = _characters_of_font()
    return "".join(c if ord(c) in known and c.isprintable() else f"\\u{ord(c):04x}" for c in text)


@cache
def _characters_of_font() -> frozenset[int]:
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())
