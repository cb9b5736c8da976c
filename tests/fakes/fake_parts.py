"""Parts of the check of a GPU, and packages of theirs: what each does is its name."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from loadtest.lab.gpu.part import Outcome, Settings


def do(name: str, settings: Settings) -> Outcome:
    match name:
        case "crash":
            os.abort()
        case "crash beside a worker":
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
            os.abort()
        case "hang":
            threading.Event().wait()
        case "break":
            raise RuntimeError("no such kernel")
        case "late":
            time.sleep(0.5)
    return Outcome("all right", passed=name != "wrong")
