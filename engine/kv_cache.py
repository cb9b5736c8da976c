"""Keys and values of the running sequences: a row, or slot, for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import RowOp
from engine.package import CacheShape

Array = NDArray[np.float32] | NDArray[np.int8]

_DTYPES = {"fp32": np.float32, "int8": np.int8}


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [num_slots, num_kv_heads, max_len, head_dim]."""

    key: Array
    value: Array


class SlotCache:
    """Rows of the decoder's self-attention and, of an encoder-decoder, of its cross-attention.

    Rows of a layer lie one after the other, so that the first B of them are one piece of memory: a
    decode step binds it as it is. Memory that no sequence reaches is never touched and costs
    nothing. Beyond its length a row is zero: a NaN left there would reach the row's next sequence.
    """

    def __init__(
        self, num_slots: int, cache: CacheShape, cross_cache: CacheShape | None = None
    ) -> None:
        self._memory = _allocate(num_slots, cache)
        self._cross_memory = _allocate(num_slots, cross_cache) if cross_cache else None
        self.layers = _layers(self._memory)
        self.cross_layers = () if self._cross_memory is None else _layers(self._cross_memory)
        self.lengths = np.zeros(num_slots, np.int32)  # positions written, a row
        self.source_lengths = np.zeros(num_slots, np.int64)

    def apply(self, ops: Iterable[RowOp]) -> None:
        """Change rows, one operation after the other."""
        for op in ops:
            if op.kind == "clear":
                self._clear(op.target)
            elif op.kind == "swap":
                self._swap(op.source, op.target)
            else:
                self._copy(op.source, op.target)
                if op.kind == "move":
                    self._clear(op.source)

    def _clear(self, row: int) -> None:
        for memory, length in self._used(row):
            memory[:, :, row, :, :length] = 0
        self.lengths[row] = self.source_lengths[row] = 0

    def _copy(self, source: int, target: int) -> None:
        for memory, length in self._used(source):
            memory[:, :, target, :, :length] = memory[:, :, source, :, :length]
        self.lengths[target] = self.lengths[source]
        self.source_lengths[target] = self.source_lengths[source]

    def _swap(self, one: int, other: int) -> None:
        for memory, length in self._used(one, other):
            kept = memory[:, :, one, :, :length].copy()
            memory[:, :, one, :, :length] = memory[:, :, other, :, :length]
            memory[:, :, other, :, :length] = kept
        for lengths in (self.lengths, self.source_lengths):
            lengths[[one, other]] = lengths[[other, one]]

    def _used(self, *rows: int) -> Iterable[tuple[Array, int]]:
        """Give the memory with the number of positions that the longest of the rows uses."""
        yield self._memory, max(int(self.lengths[row]) for row in rows)
        if self._cross_memory is not None:
            yield self._cross_memory, max(int(self.source_lengths[row]) for row in rows)


def _allocate(num_slots: int, shape: CacheShape) -> Array:
    layers, heads, length, dim = (
        shape.num_layers,
        shape.num_kv_heads,
        shape.max_len,
        shape.head_dim,
    )
    return np.zeros(
        (layers, 2, num_slots, heads, length, dim), _DTYPES[shape.dtype]
    )  # 2: key, value


def _layers(memory: Array) -> tuple[LayerCache, ...]:
    return tuple(LayerCache(key=layer[0], value=layer[1]) for layer in memory)
