"""The helpers that all comparisons of two models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME

Progress = Callable[[int, int], None]  # lines that are done, of how many

_QUANTILES = (0.5, 0.9, 0.99, 1.0)


def quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median, and what is above it, by name."""
    return {f"{q:.0%}": float(np.quantile(values, q)) for q in _QUANTILES}


def other_files(one: Path, other: Path) -> list[str]:
    """Return what of the files that make tokens of texts is not the same."""
    contents = [
        [
            file.read_bytes() if (file := path / name).is_file() else b""
            for name in (TOKENIZER_NAME, TARGET_TOKENIZER_NAME)
        ]
        for path in (one, other)
    ]
    return ["their tokenizers"] if contents[0] != contents[1] else []
