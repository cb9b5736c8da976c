"""A program that ends with the process that started it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from server.ray.processes import end_with_parent

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", sys.argv[1], "/bin/sleep", "600"],
                         stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_program_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, end_with_parent.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    _wait_until_it_is("/sleep", child)

    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([descriptor], [], [], 30)

    os.close(descriptor)
    assert ended


def _wait_until_it_is(program: str, pid: int) -> None:
    while not Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].endswith(program):
        os.sched_yield()
