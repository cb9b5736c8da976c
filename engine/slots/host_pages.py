"""Large arrays whose memory is resident page by page, while something is written there."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Pages:
    """An array of zeros in the system's smallest pages; what nobody writes takes no memory.

    numpy asks for huge pages, of 2 MiB: the first number written in one clears all of it, and makes
    whole rows of a cache resident of which a few positions are used.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        count = math.prod(shape)
        size = max(1, count * np.dtype(dtype).itemsize)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, where the system may use them unasked
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._address = _address(self._bytes)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype, count).reshape(shape)

    def clear(self, piece: NDArray[Any]) -> None:
        """Put zeros into a contiguous piece of the array; its whole pages go back to the system."""
        assert piece.flags.c_contiguous
        start = _address(piece) - self._address
        self._clear(start, start + piece.nbytes)

    def _clear(self, start: int, stop: int) -> None:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        # Elsewhere pages that are not needed may keep what was in them.
        if sys.platform != "linux" or first >= last:
            self._bytes[start:stop] = 0
            return
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self._bytes[start:first] = 0
        self._bytes[last:stop] = 0


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return the array of new Pages, for one whose memory is needed as long as it is."""
    return Pages(shape, dtype).array


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
