"""Parts of the check of a GPU that fail in every way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from engine.errors import CertificateError
from loadtest.gpu_check.part import Outcome, Settings


def right(settings: Settings) -> Outcome:
    return Outcome("all right", {"device": settings.device}, passed=True)


def wrong(settings: Settings) -> Outcome:
    return Outcome("3 of 4 rows differ", {}, passed=False)


def refuse(settings: Settings) -> Outcome:
    raise CertificateError("row 2 differs; export it again")


def break_down(settings: Settings) -> Outcome:
    raise RuntimeError("no such kernel")


def crash(settings: Settings) -> Outcome:
    os.abort()


def hang(settings: Settings) -> Outcome:
    print("begun", file=sys.stderr, flush=True)
    threading.Event().wait()
    raise AssertionError("it waits for ever")


def crash_beside_a_worker(settings: Settings) -> Outcome:
    worker = subprocess.Popen(["sleep", "600"])
    print(worker.pid, file=sys.stderr, flush=True)
    os.abort()


def environment(settings: Settings) -> Outcome:
    return Outcome("", {"ORT_ENABLE_XQA": os.environ["ORT_ENABLE_XQA"]})
