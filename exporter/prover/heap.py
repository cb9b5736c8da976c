"""How the C library keeps memory that was freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE = 2**22  # bytes of a block
_AT_HAND = 2**25  # bytes at the end of the heap


def free_large_blocks_at_once() -> None:
    """Let glibc give large blocks back to the system when they are freed, for this whole process.

    By itself it keeps all of up to 32 MiB for others, and between blocks in use for long.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):  # other libraries have none
        set_option(_M_MMAP_THRESHOLD, _LARGE)
        set_option(_M_TRIM_THRESHOLD, _AT_HAND)
