"""Which decoding rows attend to which source, as the graphs of an encoder-decoder want it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SourceShape(NamedTuple):
    """How many sources a decode call reads, and for how many rows each."""

    num_sources: int
    group: int

    @property
    def num_queries(self) -> int:
        """Rows of queries, with those for nobody."""
        return self.num_sources * self.group


def group_widths(widest: int) -> list[int]:
    """Return numbers of rows of a source, 2 to `widest`: the largest of each padded shape."""
    widths = [1 << i for i in range(1, (widest - 1).bit_length())]
    return [*widths, widest] if widest > 1 else []


def padded(num_rows: int) -> int:
    """Return what so many rows of a source are padded to: a power of 2, fast up to 16."""
    return 1 << (num_rows - 1).bit_length()


class SourceIndex:
    """The rows of each source, and where each row is among them."""

    def __init__(self, num_slots: int, least_group: int = 1) -> None:
        """Every source has room for `least_group` rows."""
        self.shape = SourceShape(0, least_group)
        self._least_group = least_group
        self.row_queries = np.zeros((num_slots, 1), np.int64)
        self.beam_rows = np.zeros(self.shape, np.int64)
        self._asked: tuple[tuple[int, ...], int] = (), 0

    def update(self, sources: Sequence[int], num_sources: int = 0) -> bool:
        """Take in the source of every row; return whether anything is other than before.

        There may be more sources, which no row has. Entries without a row hold row 0.
        """
        asked = tuple(sources), num_sources
        if asked == self._asked:
            return False
        self._asked = asked
        num_sources = max(num_sources, max(sources) + 1)
        rows: list[list[int]] = [[] for _ in range(num_sources)]
        for row, source in enumerate(sources):
            rows[source].append(row)
        group = max(self._least_group, padded(max(map(len, rows))))
        self.shape = SourceShape(num_sources, group)
        self.beam_rows = np.zeros(self.shape, np.int64)
        self.row_queries[len(sources) :] = 0
        for source, members in enumerate(rows):
            self.beam_rows[source, : len(members)] = members
            for place, row in enumerate(members):
                self.row_queries[row] = source * group + place
        return True
