"""Keys and values of the running sequences: each has a slot, which is a row of the arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.package.manifest import CacheShape
from engine.slots.batch import RowOp
from engine.slots.memory import Allocate, HostCacheMemory


class SlotCache:
    """Rows of the decoder's self-attention and, of an encoder-decoder, rows of the sources.

    A sequence has a row, a source has another: the beams of a sentence share its source's. Rows of
    a layer lie one after the other, so that the first B of them are one piece of memory: a decode
    step binds it as it is. Memory of the host that no sequence reaches is never touched and costs
    nothing. A row that becomes shorter gives its pages back, if it loses a page of a head at least,
    once no other sequence has taken them (`release_pages`). So running and cached rows use memory
    as far as their length, and a page for each of their heads at most. A row is finite beyond its
    length: masked numbers count for nothing, but a NaN left there would reach the row's next
    sequence. Lengths lie on the host.

    A row may hold numbers that a call wrote for nobody, up to `overhang` positions behind its
    length: they count as its own when the row becomes shorter or another's.
    """

    def __init__(
        self,
        num_slots: int,
        cache: CacheShape,
        cross_cache: CacheShape | None = None,
        allocate: Allocate = HostCacheMemory,
        *,
        overhang: int = 0,
    ) -> None:
        self.rows = allocate(num_slots, cache)
        self.sources = allocate(num_slots, cross_cache) if cross_cache else None
        self._max_len, self._overhang = cache.max_len, overhang
        self.layers = self.rows.layers
        self.cross_layers = () if self.sources is None else self.sources.layers
        self.lengths = np.zeros(num_slots, np.int32)  # positions written, a row
        self.source_lengths = np.zeros(num_slots, np.int64)

    def release_pages(self, *, at_rest: bool) -> None:
        """Give back what rows have lost and not taken again: of late, or `at_rest` at all."""
        self.rows.release_pages(self.lengths, at_rest=at_rest)
        if self.sources is not None:
            self.sources.release_pages(self.source_lengths, at_rest=at_rest)

    def apply(self, ops: Iterable[RowOp]) -> None:
        """Change rows, one operation after the other."""
        for op in ops:
            if op.kind == "cut":
                self._cut(op.target, op.start)
            elif op.kind == "clear":
                self._clear(op.target, op.start)
            elif op.kind in ("cut_source", "clear_source"):
                assert self.sources is not None
                let_go = self.sources.cut if op.kind == "cut_source" else self.sources.clear
                let_go(op.target, 0, int(self.source_lengths[op.target]))
                self.source_lengths[op.target] = 0
            elif op.kind == "copy_source":
                assert self.sources is not None
                length = int(self.source_lengths[op.origin])
                self.sources.copy(op.origin, op.target, 0, length)
                self.source_lengths[op.target] = length
            elif op.kind == "swap":
                self.rows.swap(op.origin, op.target, self._end(op.origin), self._end(op.target))
                self.lengths[[op.origin, op.target]] = self.lengths[[op.target, op.origin]]
            else:
                self._copy(op.origin, op.target, op.start, op.stop)
                if op.kind == "move":
                    self._clear(op.origin)

    def fill(self, value: float, num_rows: int) -> None:
        """Leave a number everywhere in the first rows, as other sequences might have left some."""
        self.rows.fill(value, num_rows)
        if self.sources is not None:
            self.sources.fill(value, num_rows)

    def forget(self) -> None:
        """Make every row empty and put zeros there, whatever was in it."""
        self.rows.forget()
        if self.sources is not None:
            self.sources.forget()
        self.lengths[:] = 0
        self.source_lengths[:] = 0

    def _end(self, row: int) -> int:
        """Return the position behind the last one that may have been written."""
        return min(int(self.lengths[row]) + self._overhang, self._max_len)

    def _cut(self, row: int, start: int) -> None:
        length = int(self.lengths[row])
        self.rows.clear(row, length, self._end(row))
        self.rows.cut(row, start, length)
        self.lengths[row] = min(start, length)

    def _clear(self, row: int, start: int = 0) -> None:
        self.rows.clear(row, start, self._end(row))
        self.lengths[row] = min(start, int(self.lengths[row]))

    def _copy(self, origin: int, target: int, start: int, stop: int | None) -> None:
        length = int(self.lengths[origin])
        if stop is not None:
            length = min(length, stop)
        self.rows.copy(origin, target, start, length)
        self.rows.clear(target, length, self._end(target))
        self.lengths[target] = length
