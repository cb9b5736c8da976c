"""A private directory for the processes of one run; it goes with them, however their owner ended.

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
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from server.listening import socket_directory

logger = logging.getLogger(__name__)

# In the environment of every process of a run: its directory. So they are known without a doubt.
MARK = "TOKENWEIR_RUN_DIRECTORY"
_PREFIX = "tokenweir-"
_OWNER = "owner"
_END_TIMEOUT = 5.0  # seconds for killed processes to end


class RunDirectory:
    """The directory of a run of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.for_ray = path / "ray"

    @contextlib.contextmanager
    def marked_environment(self) -> Iterator[None]:
        """Let processes that are started meanwhile, and theirs, be of this run."""
        os.environ[MARK] = str(self.path)
        try:
            yield
        finally:
            del os.environ[MARK]

    def remove(self) -> None:
        """End what still runs there, and remove the directory."""
        _end_processes(self.path)
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[RunDirectory]:
    """Make the directory of a run below `parent`; remove it at the end.

    By default that is /tmp, or TMPDIR where /tmp may not be written.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or socket_directory()))
    # Locked before it has its name: it must not look like that of a dead owner.
    with (path / f".{_OWNER}").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(f"{os.getpid()}\n")
        owner.flush()
        Path(owner.name).rename(path / _OWNER)
        directory = RunDirectory(path)
        try:
            yield directory
        finally:
            directory.remove()


def remove_what_dead_owners_left(parent: Path | None = None) -> list[Path]:
    """Remove the directories of this user whose owners were killed, and end what runs there.

    Returns the directories.
    """
    removed = []
    for path in (parent or socket_directory()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has just been removed, or is another user's
            if _is_private(path) and _removed_if_ownerless(path):
                logger.info("removed %s, which a killed server had left", path)
                removed.append(path)
    return removed


def _removed_if_ownerless(path: Path) -> bool:
    with (path / _OWNER).open() as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        RunDirectory(path).remove()
        return True


def _is_private(path: Path) -> bool:
    """Does a directory belong to this user, and to nobody else?"""
    found = path.lstat()
    mode_is_private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and mode_is_private


def _end_processes(path: Path) -> None:
    """Kill every process that has the mark of this directory, and wait until all have ended."""
    deadline = time.monotonic() + _END_TIMEOUT
    while (pids := _marked(path)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(path: Path) -> list[int]:
    """Return the processes of this directory; one that has ended has no environment any more."""
    mark, found = f"{MARK}={path}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]
