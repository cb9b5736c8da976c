"""Starts a program, and kills all that has come of it when the standard input ends.

`python keeper.py PROGRAM ARGUMENT...`; the program ends when it has started what stays. A process
that loses its parent becomes a child of this one, and so none escapes. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h


def main() -> None:
    """Keep the program of the command line, whatever signals come."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("prctl(PR_SET_CHILD_SUBREAPER) failed")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # ignored ones would be ignored by the program, too
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # the pipes are the program's, which closes them as it ends
    os.dup2(nothing, 2)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    program.poll()
    while os.read(0, 1):
        pass
    while found := _descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> list[int]:
    """Return all processes below one."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            _state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(process.name)] = int(parent)
    found = [root]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found[1:]


if __name__ == "__main__":
    main()
