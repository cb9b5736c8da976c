"""Rows of a cache in memory of the host, and their changes; the seam to those of a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.package.graph_io import CACHE_DTYPES, Bound
from engine.package.manifest import CacheDtype, CacheShape
from engine.slots.host_pages import Pages

HostArray = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int8]
Stored = NDArray[Any]  # numbers as a cache holds them; those of bf16, which numpy lacks, as uint16

STEPS_AT_HAND = 64  # in which another sequence may take the memory that one has left
STORED_DTYPES = {**CACHE_DTYPES, "bf16": "uint16"}


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [num_rows, num_kv_heads, max_len, head_dim]."""

    key: Bound
    value: Bound


class _Cut(NamedTuple):
    """Positions behind the end of a row that sequences have left."""

    step: int  # the first of them
    stop: int  # position behind it


class CacheMemory(Protocol):
    """Rows of one kind: keys and values of all layers. Positions are counted within a row."""

    layers: tuple[LayerCache, ...]

    def cut(self, row: int, start: int, stop: int) -> None:
        """Note that positions are not needed; they may stay as they are until `release_pages`."""

    def release_pages(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
        """Give back what was cut some steps ago, `at_rest` all of it, behind what rows hold now."""

    def clear(self, row: int, start: int, stop: int) -> None:
        """Put zeros into positions `start` to `stop` - 1, and give back what they take."""

    def copy(self, origin: int, target: int, start: int, stop: int) -> None:
        """Copy positions `start` to `stop` - 1 to the same places of another row."""

    def swap(self, one: int, other: int, one_length: int, other_length: int) -> None:
        """Exchange two rows; behind what a row receives are zeros, as far as it was longer."""

    def read(self, row: int, length: int) -> Stored:
        """Return the first positions of a row, [num_layers, 2, num_kv_heads, length, head_dim]."""

    def write(self, row: int, numbers: ArrayLike) -> None:
        """Put numbers into the first positions of a row, in the shape that `read` returns."""

    def fill(self, value: float, num_rows: int) -> None:
        """Put one number, or the nearest there is, everywhere into the first rows."""

    def forget(self) -> None:
        """Put zeros everywhere, and give back what they take."""


Allocate = Callable[[int, CacheShape], CacheMemory]  # number of rows, and what a row is


class HostCacheMemory:
    """Rows in memory of the host, [layer, key or value, row, head, position, head_dim].

    Memory that nobody wrote to takes none. A row that becomes shorter gives its pages back, if what
    it loses is a page of a head at least, and no other sequence has written there a few steps
    later: to find a page anew takes the system as long as to compute a third of its numbers.
    """

    def __init__(self, num_rows: int, shape: CacheShape) -> None:
        self._dtype = shape.dtype
        size = (shape.num_layers, 2, num_rows, *row_shape(shape))
        self._pages = Pages(size, STORED_DTYPES[shape.dtype])
        self.memory: HostArray = self._pages.array
        self.layers = tuple(LayerCache(key=layer[0], value=layer[1]) for layer in self.memory)
        position = shape.head_dim * self.memory.itemsize
        self._page = -(-mmap.PAGESIZE // position)  # positions of a head
        self._num_steps = 0
        self._cut: dict[int, _Cut] = {}  # by row, the earliest first

    def cut(self, row: int, start: int, stop: int) -> None:
        """See CacheMemory: less than a page is not worth it."""
        if stop - start >= self._page:
            known = self._cut.get(row, _Cut(self._num_steps, 0))
            self._cut[row] = known._replace(stop=max(known.stop, stop))

    def release_pages(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
        """See CacheMemory."""
        self._num_steps += 1
        last = self._num_steps - (0 if at_rest else STEPS_AT_HAND)
        while self._cut:
            row, cut = next(iter(self._cut.items()))
            if cut.step >= last:
                return
            del self._cut[row]
            start, stop = int(lengths[row]), cut.stop
            if stop - start >= self._page:
                self.clear(row, start, stop)

    def clear(self, row: int, start: int, stop: int) -> None:
        """See CacheMemory."""
        if 0 < stop - start < self._page:
            self.memory[:, :, row, :, start:stop] = 0
        elif start < stop:
            for layer in self.memory[:, :, row]:
                for array in layer:  # [H, L, D]: an empty row is one piece, any other one a head
                    for piece in array[None] if start == 0 else array[:, start:stop]:
                        self._pages.clear(piece)

    def copy(self, origin: int, target: int, start: int, stop: int) -> None:
        """See CacheMemory."""
        self.memory[:, :, target, :, start:stop] = self.memory[:, :, origin, :, start:stop]

    def swap(self, one: int, other: int, one_length: int, other_length: int) -> None:
        """See CacheMemory."""
        kept = self.read(one, one_length)
        self.copy(other, one, 0, other_length)
        self.clear(one, other_length, one_length)
        self.memory[:, :, other, :, :one_length] = kept
        self.clear(other, one_length, other_length)

    def read(self, row: int, length: int) -> Stored:
        """See CacheMemory."""
        return self.memory[:, :, row, :, :length].copy()

    def write(self, row: int, numbers: ArrayLike) -> None:
        """See CacheMemory."""
        array = stored(numbers, self._dtype)
        self.memory[:, :, row, :, : array.shape[-2]] = array

    def fill(self, value: float, num_rows: int) -> None:
        """See CacheMemory."""
        self.memory[:, :, :num_rows] = stored(value, self._dtype)

    def forget(self) -> None:
        """See CacheMemory."""
        self._pages.clear(self.memory)
        self._cut.clear()


def row_shape(shape: CacheShape) -> tuple[int, int, int]:
    """Return the shape of a row of one layer's keys or values."""
    return shape.num_kv_heads, shape.max_len, shape.head_dim


def stored(numbers: ArrayLike, dtype: CacheDtype) -> Stored:
    """Return numbers as a cache holds them; what is too large for int8 becomes the largest."""
    array = np.asarray(numbers)
    if dtype == "int8":
        array = np.clip(array, -128, 127)
    if dtype == "bf16" and array.dtype != np.uint16:
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(STORED_DTYPES[dtype], copy=False)
