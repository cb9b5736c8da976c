"""Commands of the product, as users type them."""

from __future__ import annotations

import subprocess

from loadtest.lab.serve import TOKENWEIR


def tokenweir(*arguments: object) -> tuple[int, str]:
    """Run a command, print what it prints as it comes; return its exit code and last line."""
    process = subprocess.Popen(
        [*TOKENWEIR, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    last = f"tokenweir {arguments[0]} said nothing"
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    return process.wait(), last
