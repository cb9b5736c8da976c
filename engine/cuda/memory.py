"""Arrays in the memory of a CUDA device, and the copies between it and the host."""

from __future__ import annotations

import ctypes
import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cuda.runtime import CudaRuntime, Extent, Region

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and wide loads of kernels want
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array in a device's memory, or a view of some of it."""

    address: int
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    owner: object = field(default=None, repr=False, compare=False)  # alive: so is the memory

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return some neighbouring rows, as a view."""
        first, last, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows of a view are neighbours, not every {step}th")
        shape = (max(0, last - first), *self.shape[1:])
        row = math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]
        return self.view(first * row, self.dtype, shape)

    def view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> DeviceArray:
        """Return what lies `offset` bytes behind the beginning, as another array."""
        array = DeviceArray(self.address + offset, dtype, shape, self.owner)
        if offset + array.num_bytes > self.num_bytes:
            raise ValueError(
                f"{array.num_bytes} bytes from {offset} on do not lie in an array of "
                f"{self.num_bytes} bytes"
            )
        return array


class DeviceMemory:
    """Memory of one device, exactly as much as is asked for; copies are queued on its stream.

    Memory is given back when no array of it is left.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return new zeros; OutOfDeviceMemory if there is no room."""
        num_bytes = max(1, math.prod(shape) * DTYPE_BYTES[dtype])
        address = self.runtime.allocate(num_bytes)
        owner = _Owner()
        # The end of the process frees everything, and the runtime may be gone by then.
        weakref.finalize(owner, self.runtime.free, address).atexit = False
        self.runtime.fill(address, 0, num_bytes)
        return DeviceArray(address, dtype, shape, owner)

    def upload(self, target: DeviceArray, origin: NDArray[Any]) -> None:
        """Queue a copy to the device.

        Pinned memory is read when its turn comes: it stays as it is until the stream is waited for.
        """
        _check_sizes(origin, target)
        self.runtime.upload(target.address, origin.ctypes.data, origin.nbytes)

    def download(self, target: NDArray[Any], origin: DeviceArray) -> None:
        """Queue a copy to the host, which is there when the stream was waited for."""
        _check_sizes(target, origin)
        self.runtime.download(target.ctypes.data, origin.address, target.nbytes)

    def copy_column(self, target: DeviceArray, origin: DeviceArray) -> None:
        """Queue a copy of the first column of an array [n, k] to an array [n, 1]."""
        (num_rows, width), size = origin.shape, DTYPE_BYTES[origin.dtype]
        if (target.dtype, target.shape) != (origin.dtype, (num_rows, 1)):
            raise ValueError(f"the first column of {origin} is not of the shape of {target}")
        if width == 1:
            self.runtime.copy(target.address, origin.address, target.num_bytes)
            return
        rows = (
            Region(target.address, size, num_rows),
            Region(origin.address, width * size, num_rows),
        )
        self.runtime.copy_region(*rows, Extent(size, num_rows, 1))

    def mark(self) -> DeviceMark:
        """Return a mark to be put into the queue."""
        return DeviceMark(self.runtime)

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros in memory of the host that the device copies itself, with nobody waiting."""
        size = max(1, num_bytes)
        address = self.runtime.allocate_pinned(size)
        buffer = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(buffer, self.runtime.free_pinned, address).atexit = False
        array = np.frombuffer(memoryview(buffer), np.uint8)
        array[:] = 0
        return array[:num_bytes]


class DeviceMark:
    """A mark in the queue of a device's stream: what was queued before it can be waited for."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self._event = runtime, runtime.create_event()
        weakref.finalize(self, runtime.destroy_event, self._event).atexit = False

    def put(self) -> None:
        """Queue the mark, behind everything that is queued; it is no longer where it was."""
        self._runtime.queue_event(self._event)

    def wait(self) -> None:
        """Wait until the device has come to the mark; nobody waits for one that was never put."""
        self._runtime.wait_for(self._event)


class _Owner:
    """Gives memory back when it is no longer referenced."""


def aligned(num_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _check_sizes(host: NDArray[Any], device: DeviceArray) -> None:
    if not host.flags.c_contiguous:
        raise ValueError(f"an array of shape {host.shape} on the host is not contiguous")
    if host.nbytes != device.num_bytes:
        raise ValueError(
            f"{host.nbytes} bytes on the host, shape {host.shape}, are not the "
            f"{device.num_bytes} on the device, shape {device.shape}"
        )
