"""Harms that can be done to a server."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from loadtest.lab.chaos.server import CONTROLLER, WORKER, Server


@dataclass(frozen=True)
class Harmed:
    """One harm, and how long it was felt; seconds."""

    kind: str
    recovery: float  # until enough workers served again
    first_answer: float | None  # to a request sent behind it; None: none came any more
    failures: tuple[str, ...] = ()  # errors of the streams that failed until the next harm


def harm(kind: str, server: Server) -> int | None:
    """Do something to a server; return the process that is gone when it has recovered.

    Raises LoadTestError if there is nobody to do it to.
    """
    if kind == KILL_SERVER:
        server.kill()
        server.start()
        return None
    if kind in _PAUSED:
        _pause(server.pid if kind == PAUSE_SERVER else random.choice(server.wait_for(CONTROLLER)))
        return None
    what, signal_number = _SIGNALS[kind]
    pid = _signal_one(what, signal_number, server)
    if what == CONTROLLER:  # a worker is missed by the gateway, this one by nobody for a while
        server.wait_for(what, other_than=pid)
    return pid


def _signal_one(what: str, signal_number: int, server: Server) -> int:
    """Send a signal to a process of this name, another one if it has just ended; return it."""
    while True:
        pid = random.choice(server.wait_for(what))
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
            return pid


def _pause(pid: int) -> None:
    """Stop a process for a while, as on a machine that hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(_STILL)
    finally:
        os.kill(pid, signal.SIGCONT)


_STILL = 6.0  # seconds: longer than a gateway waits for a worker
KILL_SERVER = "kill-server"  # the gateway
KILL_CONTROLLER = "kill-controller"
STOP_WORKER = "stop-worker"
PAUSE_SERVER = "pause-server"
PAUSE_CONTROLLER = "pause-controller"
_PAUSED = (PAUSE_SERVER, PAUSE_CONTROLLER)
_SIGNALS = {  # process and signal
    "kill-worker": (WORKER, signal.SIGKILL),
    STOP_WORKER: (WORKER, signal.SIGSTOP),
    "end-worker": (WORKER, signal.SIGTERM),
    KILL_CONTROLLER: (CONTROLLER, signal.SIGKILL),
}
KINDS = (*_SIGNALS, *_PAUSED, KILL_SERVER)
