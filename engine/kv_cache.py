"""Keys and values of the running sequences: a row, or slot, for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import RowOp
from engine.package import CacheShape
from engine.pages import zeros

Array = NDArray[np.float32] | NDArray[np.int8]

_DTYPES: Mapping[str, type[np.generic]] = {"fp32": np.float32, "int8": np.int8}


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [num_slots, num_kv_heads, max_len, head_dim]."""

    key: Array
    value: Array


class SlotCache:
    """Rows of the decoder's self-attention and, of an encoder-decoder, rows of the sources.

    A sequence has a row, a source has another: the beams of a sentence share its source's. Rows of
    a layer lie one after the other, so that the first B of them are one piece of memory: a decode
    step binds it as it is. Memory that no sequence reaches is never touched and costs nothing.
    Beyond its length a row is finite: what is masked counts for nothing, but a NaN left there would
    reach the row's next sequence.
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
            if op.kind == "cut":
                self.lengths[op.target] = min(op.start, self.lengths[op.target])
            elif op.kind == "clear":
                self._clear(op.target, op.start)
            elif op.kind == "cut_source":
                self.source_lengths[op.target] = 0
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

    def _clear(self, row: int, start: int = 0) -> None:
        self._memory[:, :, row, :, start : self.lengths[row]] = 0
        self.lengths[row] = min(start, self.lengths[row])

    def _clear_source(self, row: int) -> None:
        assert self._cross_memory is not None
        self._cross_memory[:, :, row, :, : self.source_lengths[row]] = 0
        self.source_lengths[row] = 0

    def _copy_source(self, source: int, target: int) -> None:
        assert self._cross_memory is not None
        length = self.source_lengths[source]
        self._cross_memory[:, :, target, :, :length] = self._cross_memory[:, :, source, :, :length]
        self.source_lengths[target] = length

    def _copy(self, source: int, target: int, start: int, stop: int | None) -> None:
        length, old_length = self.lengths[source], self.lengths[target]
        if stop is not None:
            length = min(length, stop)
        self._memory[:, :, target, :, start:length] = self._memory[:, :, source, :, start:length]
        self._memory[:, :, target, :, length:old_length] = 0
        self.lengths[target] = length

    def _swap(self, one: int, other: int) -> None:
        length = self.lengths[[one, other]].max()
        kept = self._memory[:, :, one, :, :length].copy()
        self._memory[:, :, one, :, :length] = self._memory[:, :, other, :, :length]
        self._memory[:, :, other, :, :length] = kept
        self.lengths[[one, other]] = self.lengths[[other, one]]


def _allocate(num_slots: int, shape: CacheShape) -> Array:
    layers, heads, length, dim = (
        shape.num_layers,
        shape.num_kv_heads,
        shape.max_len,
        shape.head_dim,
    )
    size = (layers, 2, num_slots, heads, length, dim)  # 2: key, value
    return zeros(size, _DTYPES[shape.dtype])


def _layers(memory: Array) -> tuple[LayerCache, ...]:
    return tuple(LayerCache(key=layer[0], value=layer[1]) for layer in memory)
