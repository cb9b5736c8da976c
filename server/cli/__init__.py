"""The command `tokenweir`: from training to a load test.

Modules here import nothing heavy at the top: `tokenweir --help` has to come at once.
"""

from __future__ import annotations

import sys

from server.cli.interruption import leave_at_once


def main() -> None:
    """Run the command line and exit; server/cli/exit_codes.py says with what."""
    leave_at_once()  # before anything takes time: a Ctrl-C in an import would print where
    from server.cli.app import run

    sys.exit(run())


__all__ = ["main"]
