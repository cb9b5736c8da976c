"""The rows of a cache and their changes, in memory of the host or of a device."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.device.cuda_runtime import Extent, Region
from engine.device.memory import DTYPE_BYTES, DeviceArray, DeviceMemory
from engine.package.graph_io import CACHE_DTYPES
from engine.package.manifest import CacheDtype, CacheShape
from engine.slots.host_pages import Pages

HostArray = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int8]
Stored = NDArray[Any]  # numbers as a cache holds them; those of bf16, which numpy lacks, as uint16

STEPS_AT_HAND = 64  # steps before pages of a shortened row are returned
_DTYPES = {**CACHE_DTYPES, "bf16": "uint16"}


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [num_rows, num_kv_heads, max_len, head_dim]."""

    key: HostArray | DeviceArray
    value: HostArray | DeviceArray


class _Cut(NamedTuple):
    """Positions behind the end of a row that sequences have left."""

    step: int  # the first of them
    stop: int  # position behind it


class CacheMemory(Protocol):
    """Rows of one kind: keys and values of all layers. Positions are counted within a row."""

    layers: tuple[LayerCache, ...]

    def cut(self, row: int, start: int, stop: int) -> None:
        """Note that positions are not needed; they stay as they are until `settle`, or for good."""

    def settle(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
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
        size = (shape.num_layers, 2, num_rows, *_row(shape))
        self._pages = Pages(size, _DTYPES[shape.dtype])
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

    def settle(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
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
        stored = _stored(numbers, self._dtype)
        self.memory[:, :, row, :, : stored.shape[-2]] = stored

    def fill(self, value: float, num_rows: int) -> None:
        """See CacheMemory."""
        self.memory[:, :, :num_rows] = _stored(value, self._dtype)

    def forget(self) -> None:
        """See CacheMemory."""
        self._pages.clear(self.memory)
        self._cut.clear()


class DeviceCacheMemory:
    """Rows in memory of a device, [layer and key or value, row, head, position, head_dim].

    All of it is taken at once: OutOfDeviceMemory if it is not there. Changes of rows are queued on
    the device's stream, a call for all layers, keys and values; `read`, `write` and `fill` wait.
    One more row lies behind the others, through which two rows are exchanged.
    """

    def __init__(self, memory: DeviceMemory, num_rows: int, shape: CacheShape) -> None:
        self._device, self._runtime = memory, memory.runtime
        self._shape, self._spare = shape, num_rows
        dtype = CACHE_DTYPES[shape.dtype]
        self._position = shape.head_dim * DTYPE_BYTES[dtype]  # bytes of a head
        num_planes = 2 * shape.num_layers
        self._memory = memory.zeros((num_planes, num_rows + 1, *_row(shape)), dtype)
        planes = [self._plane(i) for i in range(num_planes)]
        self.layers = tuple(map(LayerCache, planes[0::2], planes[1::2]))

    def cut(self, row: int, start: int, stop: int) -> None:
        """See CacheMemory: nothing is given back."""

    def settle(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
        """See CacheMemory: nothing is given back."""

    def clear(self, row: int, start: int, stop: int) -> None:
        """See CacheMemory."""
        if start < stop:
            self._runtime.clear_region(self._region(row, start), self._extent(stop - start))

    def copy(self, origin: int, target: int, start: int, stop: int) -> None:
        """See CacheMemory."""
        if start < stop:
            self._copy(self._region(target, start), self._region(origin, start), stop - start)

    def swap(self, one: int, other: int, one_length: int, other_length: int) -> None:
        """See CacheMemory."""
        self.copy(one, self._spare, 0, one_length)
        self.copy(other, one, 0, other_length)
        self.clear(one, other_length, one_length)
        self.copy(self._spare, other, 0, one_length)
        self.clear(other, one_length, other_length)

    def read(self, row: int, length: int) -> Stored:
        """See CacheMemory."""
        host = self._pinned(length)
        if length:
            self._copy(self._host_region(host), self._region(row, 0), length)
            self._runtime.synchronize()
        return host.copy()  # pinned memory is scarce

    def write(self, row: int, numbers: ArrayLike) -> None:
        """See CacheMemory."""
        stored = _stored(numbers, self._shape.dtype)
        if length := stored.shape[-2]:
            host = self._pinned(length)
            host[:] = stored
            self._copy(self._region(row, 0), self._host_region(host), length)
            self._runtime.synchronize()

    def fill(self, value: float, num_rows: int) -> None:
        """See CacheMemory."""
        length = self._shape.max_len
        row = np.full((length, 1), value)  # the same in all layers, heads and numbers
        for i in range(num_rows):
            self.write(i, row) if i == 0 else self.copy(0, i, 0, length)

    def forget(self) -> None:
        """See CacheMemory."""
        self._runtime.fill(self._memory.address, 0, self._memory.num_bytes)

    def _plane(self, i: int) -> DeviceArray:
        plane = self._memory[i : i + 1]
        return plane.view(0, plane.dtype, plane.shape[1:])[: self._spare]

    def _copy(self, target: Region, origin: Region, num_positions: int) -> None:
        self._runtime.copy_region(target, origin, self._extent(num_positions))

    def _region(self, row: int, start: int) -> Region:
        heads = self._shape.num_kv_heads
        pitch, height = self._shape.max_len * self._position, (self._spare + 1) * heads
        return Region(self._memory.address, pitch, height, start * self._position, row * heads)

    def _host_region(self, array: Stored) -> Region:
        length = array.shape[-2]
        return Region(array.ctypes.data, length * self._position, self._shape.num_kv_heads)

    def _extent(self, num_positions: int) -> Extent:
        shape = self._shape
        return Extent(num_positions * self._position, shape.num_kv_heads, 2 * shape.num_layers)

    def _pinned(self, length: int) -> Stored:
        shape = self._shape
        size = (shape.num_layers, 2, shape.num_kv_heads, length, shape.head_dim)
        array = self._device.pinned(math.prod(size[:4]) * self._position)
        return array.view(_DTYPES[shape.dtype]).reshape(size)


def row_bytes(shape: CacheShape) -> int:
    """Return the bytes of a row of all layers, keys and values."""
    return 2 * shape.num_layers * math.prod(_row(shape)) * DTYPE_BYTES[CACHE_DTYPES[shape.dtype]]


def _row(shape: CacheShape) -> tuple[int, int, int]:
    return shape.num_kv_heads, shape.max_len, shape.head_dim


def _stored(numbers: ArrayLike, dtype: CacheDtype) -> Stored:
    """Return numbers as a cache holds them; what is too large for int8 becomes the largest."""
    array = np.asarray(numbers)
    if dtype == "int8":
        array = np.clip(array, -128, 127)
    if dtype == "bf16" and array.dtype != np.uint16:
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(_DTYPES[dtype], copy=False)
