"""A model's outputs for a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class DistantRows(Protocol):
    """Rows that stay on a device until they are read, as an array is: LazyRows of engine.cuda."""

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows of how many numbers there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, which: int | slice) -> Floats: ...

    def __array__(self) -> NDArray[Any]: ...

    def fetch(self, rows: Iterable[int]) -> None:
        """Bring all rows that will be read in one go."""


class Drawn(NamedTuple):
    """The next tokens of rows, as the graph for it has drawn them."""

    ids: NDArray[np.int64]  # [B]
    logprobs: NDArray[np.float64]  # [B]


class StepLogits(NamedTuple):
    """The model's outputs for a step; the next step overwrites the arrays.

    The top tokens are those of the k largest logits, best first, the lower id first among equals.
    """

    logits: Floats | DistantRows  # [N, vocab_size]
    top_ids: NDArray[np.int64]  # [N, k]
    top_logits: Floats  # [N, k]
    top_logprobs: Floats  # [N, k]: log-softmax over the whole vocabulary
    alignment: Floats | None = None  # [num_aligned, longest source], if any
    drawn: Drawn | None = None  # the first rows, those that decode; None: not asked for

    @property
    def all_logits(self) -> Floats:
        """The logits of all rows as an array."""
        return np.asarray(self.logits)

    def fetch(self, rows: Iterable[int]) -> None:
        """Bring the logits of rows that will be read to the host, if they are not there."""
        if not isinstance(self.logits, np.ndarray):
            self.logits.fetch(rows)
