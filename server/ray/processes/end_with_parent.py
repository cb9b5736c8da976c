"""Runs a program that is killed when the process that starts it ends, however that ends.

`python end_with_parent.py PROGRAM ARGUMENT...`; the program must be a path. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h; it outlives exec


def main() -> None:
    """Become the program of the command line."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
