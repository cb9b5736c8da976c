"""A private directory for the processes of one run; one that a killed owner left is removed.

/tmp/tokenweir-x1y2z3a4/    mode 0700: what is below is reached by its user alone
    owner                   locked for as long as the owner lives
    ray/                    for Ray, which opens its directories to everybody
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from server.listening import socket_directory

logger = logging.getLogger(__name__)

_PREFIX = "tokenweir-"
_OWNER = "owner"


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """Make the directory of a run below `parent`, private to this user; remove it at the end.

    By default that is /tmp, or TMPDIR where /tmp may not be written.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or socket_directory()))
    # Locked before it has its name: it must not look like that of a dead owner.
    with (path / f".{_OWNER}").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(f"{os.getpid()}\n")
        owner.flush()
        Path(owner.name).rename(path / _OWNER)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_what_dead_owners_left(parent: Path | None = None) -> list[Path]:
    """Remove the directories of this user whose owners were killed; return them."""
    removed = []
    for path in (parent or socket_directory()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has just been removed, or is another user's
            found = path.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
                continue
            with (path / _OWNER).open() as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it lives
                shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a killed server had left", path)
            removed.append(path)
    return removed
