"""Large arrays whose memory becomes resident page by page, as it is written."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray


def zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Return zeros in the system's smallest pages; what nobody writes takes no memory.

    numpy asks for huge pages, of 2 MiB: the first number written in one clears all of it, and makes
    whole rows of a cache resident of which a few positions are used.
    """
    count = math.prod(shape)
    size = max(1, count * np.dtype(dtype).itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, where the system may use them unasked
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
