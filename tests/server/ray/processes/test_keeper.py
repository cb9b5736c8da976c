"""A program, and all that has come of it, that ends with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from server.ray.processes import keeper

# Starts a program that ends, behind a child that leaves it and a child of that one.
_PARENT = """
import subprocess, sys
program = "/bin/sh -c 'sleep 600 & echo $!; exec sleep 600' 2>&1 & echo $!"
kept = subprocess.Popen(
    [sys.executable, "-I", sys.argv[1], "/usr/bin/setsid", "/bin/sh", "-c", program],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(kept.pid, kept.stdout.readline(), kept.stdout.readline(), sep=" ", flush=True)
sys.stdin.read()
kept.communicate()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_has_left_a_program_ends_with_the_parent_of_it(is_killed: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, keeper.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    lines = [parent.stdout.readline() for _ in range(3)]
    pids = [int(word) for word in " ".join(lines).split()]
    running = [os.pidfd_open(pid) for pid in pids]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pids[0], number)
    assert len(pids) == 3 and select.select(running, [], [], 0)[0] == []
    if is_killed:
        parent.kill()
    parent.communicate()

    for descriptor in running:
        assert select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)
