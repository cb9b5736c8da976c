"""The command `tokenweir`: from training to a load test.

Modules here import nothing heavy at the top: `tokenweir --help` has to come at once.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys


def main() -> None:
    """Run the command line and exit; server/cli/exit_codes.py says with what."""
    # Before anything is imported that takes time: a Ctrl-C there would print a traceback.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: os._exit(128 + number))
    # gRPC's own message about a failed handshake is no line of our log, and no JSON.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    code = 0
    atexit.register(lambda: _leave(code))  # the first, so that it is called last
    from server.cli.app import run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack a letter of an answer
    code = run()
    sys.exit(code)


def _leave(code: int) -> None:
    """End a process that a signal ended at once: to take torch apart lasts for seconds."""
    if code > 128:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


__all__ = ["main"]
