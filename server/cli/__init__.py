"""The command `tokenweir`: from training to a load test.

Modules here import nothing heavy at the top: `tokenweir --help` has to come at once.
"""

from server.cli.app import main

__all__ = ["main"]
