"""Keys and values of the running sequences: a row, or slot, for each of them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import RowOp
from engine.package import CacheShape
from engine.pages import Pages

Array = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int8]

# Not bf16: onnxruntime has no kernels for it on a CPU.
_DTYPES: Mapping[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [num_slots, num_kv_heads, max_len, head_dim]."""

    key: Array
    value: Array


class SlotCache:
    """Rows of the decoder's self-attention and, of an encoder-decoder, rows of the sources.

    A sequence has a row, a source has another: the beams of a sentence share its source's. Rows of
    a layer lie one after the other, so that the first B of them are one piece of memory: a decode
    step binds it as it is. Memory that no sequence reaches is never touched and costs nothing, and
    a row that becomes shorter gives its pages back, if what it loses is a page of a head at least:
    in use is what running or kept rows hold as far as their length, and a page for each of their
    heads at most. Beyond its length a row is finite: what is masked counts for nothing, but a NaN
    left there would reach the row's next sequence.
    """

    def __init__(
        self, num_slots: int, cache: CacheShape, cross_cache: CacheShape | None = None
    ) -> None:
        self._rows = _Rows(num_slots, cache)
        self._sources = _Rows(num_slots, cross_cache) if cross_cache else None
        self.layers = self._rows.layers
        self.cross_layers = () if self._sources is None else self._sources.layers
        self.lengths = np.zeros(num_slots, np.int32)  # positions written, a row
        self.source_lengths = np.zeros(num_slots, np.int64)

    def apply(self, ops: Iterable[RowOp]) -> None:
        """Change rows, one operation after the other."""
        for op in ops:
            if op.kind == "cut":
                self._cut(op.target, op.start)
            elif op.kind == "clear":
                self._clear(op.target, op.start)
            elif op.kind == "cut_source":
                self._cut_source(op.target)
            elif op.kind == "clear_source":
                self._clear_source(op.target)
            elif op.kind == "copy_source":
                self._copy_source(op.source, op.target)
            elif op.kind == "swap":
                self._swap(op.source, op.target)
            else:
                self._copy(op.source, op.target, op.start, op.stop)
                if op.kind == "move":
                    self._clear(op.source)

    def _cut(self, row: int, start: int) -> None:
        self._rows.cut(row, start, self.lengths[row])
        self.lengths[row] = min(start, self.lengths[row])

    def _clear(self, row: int, start: int = 0) -> None:
        self._rows.clear(row, start, self.lengths[row])
        self.lengths[row] = min(start, self.lengths[row])

    def _cut_source(self, row: int) -> None:
        assert self._sources is not None
        self._sources.cut(row, 0, self.source_lengths[row])
        self.source_lengths[row] = 0

    def _clear_source(self, row: int) -> None:
        assert self._sources is not None
        self._sources.clear(row, 0, self.source_lengths[row])
        self.source_lengths[row] = 0

    def _copy_source(self, source: int, target: int) -> None:
        assert self._sources is not None
        length = self.source_lengths[source]
        self._sources.copy(source, target, 0, length)
        self.source_lengths[target] = length

    def _copy(self, source: int, target: int, start: int, stop: int | None) -> None:
        length, old_length = self.lengths[source], self.lengths[target]
        if stop is not None:
            length = min(length, stop)
        self._rows.copy(source, target, start, length)
        self._rows.clear(target, length, old_length)
        self.lengths[target] = length

    def _swap(self, one: int, other: int) -> None:
        length, other_length = self.lengths[[one, other]]
        kept = self._rows.memory[:, :, one, :, :length].copy()
        self._rows.copy(other, one, 0, other_length)
        self._rows.clear(one, other_length, length)
        self._rows.memory[:, :, other, :, :length] = kept
        self._rows.clear(other, length, other_length)
        self.lengths[[one, other]] = other_length, length


class _Rows:
    """The memory of one kind of rows, [layer, key or value, row, head, position, head_dim]."""

    def __init__(self, num_rows: int, shape: CacheShape) -> None:
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, shape.max_len, shape.head_dim)
        self._pages = Pages(size, _DTYPES[shape.dtype])
        self.memory: Array = self._pages.array
        self.layers = tuple(LayerCache(key=layer[0], value=layer[1]) for layer in self.memory)
        position = shape.head_dim * self.memory.itemsize
        self._page = -(-mmap.PAGESIZE // position)  # positions of a head

    def cut(self, row: int, start: int, stop: int) -> None:
        """Give back the pages of positions, if they are a page at least; else they stay."""
        if stop - start >= self._page:
            self.clear(row, start, stop)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Put zeros into positions, and give their pages back if they are a page at least."""
        if 0 < stop - start < self._page:
            self.memory[:, :, row, :, start:stop] = 0
        elif start < stop:
            for layer in self.memory[:, :, row]:
                for array in layer:  # [H, L, D]: an empty row is one piece, any other one a head
                    for piece in array[None] if start == 0 else array[:, start:stop]:
                        self._pages.clear(piece)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions from one row to another."""
        self.memory[:, :, target, :, start:stop] = self.memory[:, :, source, :, start:stop]
