"""A graph's file of weights, mapped into memory: resident is what was read there of late."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LARGE = 32 * 2**20  # bytes; the pages of a smaller file are not worth looking after
_NUM_TOKENS = 256  # after so many, pages are given back: the system reads 64 KiB for a row
_LOADING_PAUSE = 0.02  # seconds


class MappedWeights:
    """The file that a graph's weights lie in.

    onnxruntime packs the weights of products into memory of its own, and reads others here: an
    embedding's row for every token. A matrix that is both would be resident twice. So pages are
    given back to the system, again and again while a graph is loaded and while it runs. The next
    read of a page comes from the system's page cache, in 2 microseconds for the row of a token; or
    from the disk, if the memory was needed for something else meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Map a file; ValueError if it is empty. Nobody can write to it here."""
        self.path = path
        self._file = path.open("rb")  # open as long as it is mapped, to see what becomes of it
        weakref.finalize(self, self._file.close)
        self._file_number = self._file.fileno()
        self._written = _last_written(self._file_number)
        self.memory = mmap.mmap(self._file_number, 0, access=mmap.ACCESS_READ)
        self._is_large = len(self.memory) >= _LARGE
        self._num_tokens = 0

    @classmethod
    def of(cls, graph: Path) -> MappedWeights | None:
        """Map the weights of a graph; None if it has no file for them."""
        path = graph.with_name(f"{graph.name}.data")
        return cls(path) if path.is_file() and path.stat().st_size else None

    @contextmanager
    def being_loaded(self) -> Iterator[None]:
        """Let go of pages while everything is read once, and at the end of it."""
        is_over = threading.Event()

        def give_back() -> None:
            while not is_over.wait(_LOADING_PAUSE):
                self._give_back()
            self._give_back()

        thread = threading.Thread(target=give_back, name="pages of weights")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def have_been_read(self, num_tokens: int = _NUM_TOKENS // 2) -> None:
        """Note that the graph has run, for so many tokens; let go of pages from time to time.

        Not after every step of a few sequences: all pages would have to be found again in the next.
        """
        self._num_tokens += num_tokens
        if self._num_tokens >= _NUM_TOKENS:
            self._num_tokens = 0
            self._give_back()

    @property
    def were_written_to(self) -> bool:
        """Whether somebody has written to the file since, which the graph reads as it is now.

        A file that is renamed, deleted or replaced by another is still the one that is mapped.
        """
        return _last_written(self._file_number) != self._written

    def _give_back(self) -> None:
        if self._is_large and hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED)


def _last_written(file_number: int) -> tuple[int, int]:
    found = os.fstat(file_number)
    return found.st_mtime_ns, found.st_size
