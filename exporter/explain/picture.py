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
    from matplotlib.figure import FigureBase

# Inches; labels stay readable because the figure grows with the text, not the other way round.
_CELL = 0.125  # a token in a panel
_MIN_PANEL = 1.4
_MAX_TOKENS = 48  # in a panel with labels on all of them; longer texts get every n-th
_CHARACTER = 0.062  # a character of a label
_HEADING = 0.35  # above a block, and above all of them
_TITLE = 0.4  # above a panel, with the gap to the next one
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


def draw(caption: str, blocks: Sequence[TextBlock | ImageBlock]) -> bytes:
    """Return a PNG of the blocks below one another, under a caption."""
    from matplotlib.figure import Figure

    sizes = [_size(block) for block in blocks]
    caption = _clip(caption, _MAX_CAPTION)
    width = max(*(width for width, _ in sizes), _CHARACTER * 1.6 * len(caption))
    heights = [height for _, height in sizes]
    height = sum(heights) + _HEADING
    figure = Figure(figsize=(width, height), layout="constrained")
    _head(figure, caption, fontsize=11, fontweight="bold")
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)
    for part, block in zip(parts.flat, blocks, strict=True):
        _draw_block(part, block)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=min(_DPI, _MAX_PIXELS / max(width, height)))
    return buffer.getvalue()


def _size(block: TextBlock | ImageBlock) -> tuple[float, float]:
    """Return the width and the height of a block, in inches."""
    num_layers, num_heads = block.weights.shape[:2]
    width = height = _MIN_PANEL
    if isinstance(block, TextBlock):
        width, height = (
            max(_MIN_PANEL, _CELL * min(len(columns), _MAX_TOKENS))
            + _CHARACTER * min(_MAX_LABEL, max(map(len, labels)))
            for columns, labels in ((block.keys, block.queries), (block.queries, block.keys))
        )
    return num_heads * (width + 0.25) + 0.8, num_layers * (height + _TITLE) + _HEADING


def _draw_block(figure: FigureBase, block: TextBlock | ImageBlock) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize

    _head(figure, block.title, fontsize=9)
    panels = figure.subplots(*block.weights.shape[:2], squeeze=False)
    highest = float(block.weights.max()) or 1.0
    scale = Normalize(0, highest)
    cmap: str | Colormap = "Blues"
    if isinstance(block, ImageBlock):
        cmap = LinearSegmentedColormap.from_list("attention", [(1.0, 1.0, 1.0), _RED])
    for (layer, head), axes in np.ndenumerate(panels):
        title = f"layer {layer + 1}, head {head + 1}"
        axes.set_title(title, fontsize=_FONT_SIZE + 1, pad=3, loc="left")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color="0.7", linewidth=0.5)
        weights = block.weights[layer, head]
        if isinstance(block, TextBlock):
            axes.imshow(weights, cmap=cmap, norm=scale, aspect="auto", interpolation="nearest")
            _label(axes, block)
            continue
        extent = (0.0, float(block.image.shape[0]), float(block.image.shape[0]), 0.0)
        axes.imshow(block.image, cmap="gray", vmin=0, vmax=1, extent=extent)
        # The more attention, the less of the image shows through.
        red = np.broadcast_to(_RED, (*weights.shape, 3))
        opacity = np.clip(scale(weights), 0, 1)[..., None]
        axes.imshow(np.concatenate([red, opacity], -1), extent=extent, interpolation="nearest")
    bar = figure.colorbar(ScalarMappable(scale, cmap), ax=panels[0], aspect=12)
    bar.set_ticks([0, highest], labels=["0", f"{highest:.2g}"], fontsize=_FONT_SIZE)


def _head(figure: FigureBase, text: str, **font: Any) -> None:
    figure.suptitle(_printable(text), x=0.01, ha="left", parse_math=False, **font)


def _label(axes: Axes, block: TextBlock) -> None:
    """Write the tokens beside a panel, and lines between them."""
    num_queries, num_keys = len(block.queries), len(block.keys)
    lines: dict[str, Any] = {"colors": "0.9", "linewidths": 0.3}
    axes.hlines(np.arange(num_queries - 1) + 0.5, -0.5, num_keys - 0.5, **lines)
    axes.vlines(np.arange(num_keys - 1) + 0.5, -0.5, num_queries - 0.5, **lines)
    # As plain text: tick objects take five times longer.
    font: dict[str, Any] = {"fontsize": _FONT_SIZE, "parse_math": False}
    beside, under = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    for i, token, is_longest in _labelled(block.queries):
        place: dict[str, Any] = {"ha": "right", "va": "center_baseline", "transform": beside}
        axes.text(-0.02, i, token, **place, **font, in_layout=is_longest)
    for i, token, is_longest in _labelled(block.keys):
        place = {"ha": "center", "va": "top", "rotation": 90, "transform": under}
        axes.text(i, -0.02, token, **place, **font, in_layout=is_longest)


def _labelled(tokens: Sequence[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield place and text of labels, and whether room is made for one: for the longest."""
    places = range(0, len(tokens), -(-len(tokens) // _MAX_TOKENS))
    labels = [_printable(_clip(tokens[i], _MAX_LABEL)) for i in places]
    longest = max(labels, key=len)
    yield from ((i, label, label is longest) for i, label in zip(places, labels, strict=True))


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
