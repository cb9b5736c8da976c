"""Rows of a cache in memory of a device, and their changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.cuda.memory import DTYPE_BYTES, DeviceArray, DeviceMemory
from engine.cuda.runtime import Extent, Region
from engine.package.graph_io import CACHE_DTYPES
from engine.package.manifest import CacheShape
from engine.slots.memory import STORED_DTYPES, LayerCache, Stored, row_shape, stored


class DeviceCacheMemory:
    """Rows in memory of a device, [layer and key or value, row, head, position, head_dim].

    All of it is taken at once: OutOfDeviceMemory if it is not there. Changes of rows are queued on
    the device's stream, a call for all layers, keys and values; `read`, `write` and `fill` wait.
    Behind the rows lies one more, through which two rows are exchanged.
    """

    def __init__(self, memory: DeviceMemory, num_rows: int, shape: CacheShape) -> None:
        self._device, self._runtime = memory, memory.runtime
        self._shape, self._spare = shape, num_rows
        dtype = CACHE_DTYPES[shape.dtype]
        self._position = shape.head_dim * DTYPE_BYTES[dtype]  # bytes of a head
        num_planes = 2 * shape.num_layers
        self._memory = memory.zeros((num_planes, num_rows + 1, *row_shape(shape)), dtype)
        planes = [self._plane(i) for i in range(num_planes)]
        self.layers = tuple(map(LayerCache, planes[0::2], planes[1::2]))

    def cut(self, row: int, start: int, stop: int) -> None:
        """See CacheMemory: nothing is given back."""

    def release_pages(self, lengths: NDArray[np.integer[Any]], *, at_rest: bool) -> None:
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
        array = stored(numbers, self._shape.dtype)
        if length := array.shape[-2]:
            host = self._pinned(length)
            host[:] = array
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
        return array.view(STORED_DTYPES[shape.dtype]).reshape(size)


def row_bytes(shape: CacheShape) -> int:
    """Return the bytes of a row of all layers, keys and values."""
    return (
        2 * shape.num_layers * math.prod(row_shape(shape)) * DTYPE_BYTES[CACHE_DTYPES[shape.dtype]]
    )
