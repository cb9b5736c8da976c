"""Files that are read again when they change: certificates, and tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from engine.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The content of some files, read again when they change; any thread may ask."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        period: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read them, and look at them at most once in `period` seconds.

        `read` raises ConfigError for files that cannot be used, and so does this.
        """
        self._paths, self._read = paths, read
        self._period, self._clock = period, clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen = _stamps(paths)
        self._content = read()

    def content(self) -> T:
        """Return the content of now, or the last that could be used."""
        self.changed()
        return self._content

    def changed(self) -> T | None:
        """Return the content if it has changed since somebody asked.

        Files that cannot be used are logged, and the content before them stays.
        """
        if self._clock() - self._looked < self._period:
            return None
        with self._lock:
            self._looked = self._clock()
            seen = _stamps(self._paths)
            if seen == self._seen:
                return None
            self._seen = seen
            try:
                self._content = self._read()
            except ConfigError as error:
                logger.error("%s; what was read before goes on", error)
                return None
        logger.info("%s has changed, and counts from now on", self._paths[0])
        return self._content


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Return what tells one content of files from the next, without reading them.

    A link counts as what it leads to: secrets are often renewed by another link.
    """
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append(None)
    return found
