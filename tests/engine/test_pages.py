"""Memory that becomes resident as it is written."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from engine.pages import zeros

PAGE_MAP = Path("/proc/self/pagemap")
needs_page_map = pytest.mark.skipif(not PAGE_MAP.exists(), reason="the system does not tell")


def resident(array: np.ndarray) -> int:
    """Return how many bytes of the pages of a contiguous array are resident."""
    first = array.__array_interface__["data"][0] // PAGESIZE
    num_pages = -(-array.nbytes // PAGESIZE)
    entries = np.fromfile(PAGE_MAP, np.uint64, num_pages, offset=8 * first)  # an entry a page
    return int(np.count_nonzero(entries >> 63)) * PAGESIZE  # bit 63: the page is in memory


def test_zeros_are_writable_zeros_of_the_shape() -> None:
    array = zeros((2, 3), np.int8)
    array[1] += 1

    assert array.dtype == np.int8 and array.flags.c_contiguous
    assert array.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert zeros((0, 5), np.float32).shape == (0, 5)


@needs_page_map
def test_only_what_is_written_becomes_resident() -> None:
    array = zeros((256, 2**17), np.float32)  # 256 rows of 512 KiB

    array[:, :100] = 1

    assert resident(array) == 256 * PAGESIZE
