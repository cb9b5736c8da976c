"""Memory that becomes resident as it is written."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from engine.slots.host_pages import Pages, zeros

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


@needs_page_map
def test_pages_given_back_read_as_zeros_and_take_no_memory() -> None:
    pages = Pages((8, 2**16), np.int8)  # rows of 16 small pages
    pages.array[:] = 1

    pages.clear(pages.array[2:4])

    assert resident(pages.array) == 6 * 2**16
    assert not pages.array[2:4].any()
    assert pages.array[:2].all() and pages.array[4:].all()


@pytest.mark.parametrize(("start", "stop"), [(5, 9), (5, 9000), (4096, 8192), (1, 4097), (3, 3)])
def test_clearing_ends_at_the_piece_and_not_at_its_pages(start: int, stop: int) -> None:
    pages = Pages((10_000,), np.int8)
    pages.array[:] = 1

    pages.clear(pages.array[start:stop])

    assert np.flatnonzero(pages.array == 0).tolist() == list(range(start, stop))
