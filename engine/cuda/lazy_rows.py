"""Rows of numbers that stay where a model wrote them until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

Row = NDArray[np.float32]


class LazyRows:
    """An array [num_rows, width] of which a row is fetched when it is read for the first time.

    It is read as an array is: by row, by a slice of rows, or as a whole.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        fetch: Callable[[Sequence[int]], Iterable[Row]],
        known: Mapping[int, Row] | None = None,
    ) -> None:
        """`fetch` brings rows, [width] each, in the order of their numbers, all in one go.

        Those that are `known` are there.
        """
        self.shape = num_rows, width
        self._fetch = fetch
        self._rows: dict[int, Row] = dict(known or {})

    def __len__(self) -> int:
        return self.shape[0]

    def fetch(self, rows: Iterable[int]) -> None:
        """Bring all rows that will be read in one go."""
        missing = sorted(set(rows).difference(self._rows))
        if missing:
            self._rows.update(zip(missing, self._fetch(missing), strict=True))

    def __getitem__(self, which: int | slice) -> Row:
        if isinstance(which, slice):
            return self._stacked(range(len(self))[which])
        self.fetch((which,))
        return self._rows[which]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray:  # type: ignore[type-arg]
        return self._stacked(range(len(self))).astype(dtype or np.float32, copy=False)

    def _stacked(self, rows: Sequence[int]) -> Row:
        self.fetch(rows)
        found = [self._rows[row] for row in rows]
        return np.stack(found) if found else np.empty((0, self.shape[1]), np.float32)
