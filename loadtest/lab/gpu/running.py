"""Runs parts one after the other, each in a process that may crash or hang by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Event

from loadtest.lab.gpu.child import command_of
from loadtest.lab.gpu.part import Outcome, Part, Result, Settings, Status

_FOREGROUND, _A_PACKAGE = 4, 2  # cores
_LAST_BYTES = 4096  # its end of a log says why a process crashed
_LOOK = 0.5  # seconds between two looks whether all is to end
_NEVER = Event()
_STATUSES: dict[bool | None, Status] = {None: "measured", True: "passed", False: "failed"}


def run_parts(
    chosen: Sequence[Part], settings: Settings, out: Path, budget: float, *, prepare: bool
) -> Iterator[Part | Result]:
    """Yield every part when it begins, and its result; `budget` is in seconds, for all of them.

    A part that is expected to take more than is left is not begun. With `prepare` packages are made
    on cores that the parts do not have, and a part whose package is there goes before others.
    """
    deadline = time.monotonic() + budget
    todo = list(chosen)
    with Packages(settings, out / "packages.txt", deadline, beside=prepare) as packages:
        if prepare:
            packages.make(part.package for part in todo if part.package)
        while todo:
            part = packages.first_there(todo) if prepare else todo[0]
            todo.remove(part)
            left = deadline - time.monotonic()
            if part.seconds <= left and (why := packages.wait(part.package, left - part.seconds)):
                yield Result(part.name, "failed", part.seconds, 0.0, f"no package: {why}")
                continue
            left = deadline - time.monotonic()
            if part.seconds > left:
                why = f"takes about {part.seconds:.0f} s, {max(0.0, left):.0f} s were left"
                yield Result(part.name, "not run", part.seconds, 0.0, why)
                continue
            yield part
            started = time.monotonic()
            limit = min(part.limit, left)
            cores = packages.cores_left
            status, outcome = run_task(settings, cores, out / "log.txt", limit, part=part.name)
            seconds = time.monotonic() - started
            yield Result(part.name, status, part.seconds, seconds, outcome.summary, outcome.found)


class Packages:
    """Packages in the making, each by a process; `beside` parts on cores that those do not have."""

    def __init__(self, settings: Settings, log: Path, deadline: float, *, beside: bool) -> None:
        self._settings, self._log, self._deadline = settings, log, deadline
        self._ended = Event()
        self._jobs: dict[str, Future[str]] = {}
        self._cores = sorted(os.sched_getaffinity(0))
        spare = self._cores[_FOREGROUND:] if beside else []
        groups = [spare[i : i + _A_PACKAGE] for i in range(0, len(spare), _A_PACKAGE)]
        self._free: Queue[list[int]] = Queue()
        for group in groups or [self._cores]:
            self._free.put(group)
        self._pool = ThreadPoolExecutor(max(1, len(groups)))

    def __enter__(self) -> Packages:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def cores_left(self) -> list[int]:
        """The cores on which nothing is made."""
        is_idle = all(job.done() for job in self._jobs.values())
        return self._cores if is_idle else self._cores[:_FOREGROUND]

    def make(self, names: Iterable[str]) -> None:
        """Begin to make those that nobody has asked for."""
        for name in names:
            if name not in self._jobs:
                self._jobs[name] = self._pool.submit(self._made, name)

    def first_there(self, parts: Sequence[Part]) -> Part:
        """Return the first part whose package is made, or has failed, as soon as there is one."""
        left = self._deadline - time.monotonic() - min(part.seconds for part in parts)
        if all(part.package for part in parts):
            jobs = [self._jobs[part.package] for part in parts]
            wait(jobs, max(0.0, left), FIRST_COMPLETED)
        there = (one for one in parts if not one.package or self._jobs[one.package].done())
        return next(there, parts[0])

    def wait(self, name: str, seconds: float) -> str:
        """Return why there is no package; "": there is, or it is not finished."""
        if not name:
            return ""
        self.make([name])
        with suppress(NotInTime):
            return self._jobs[name].result(seconds)
        return ""

    def _made(self, name: str) -> str:
        started, cores = time.monotonic(), self._free.get()
        try:
            left = max(1.0, self._deadline - started)
            own = self._log.with_name(f"{self._log.name}.{name}")  # others write meanwhile
            status, made = run_task(self._settings, cores, own, left, self._ended, package=name)
        finally:
            self._free.put(cores)
        seconds = time.monotonic() - started
        with self._log.open("a") as log:
            log.write(own.read_text(errors="replace"))
            log.write(f"== {name}: {status} in {seconds:.0f} s: {made.summary}\n")
        own.unlink()
        return "" if status == "passed" else made.summary


def run_task(
    settings: Settings,
    cores: Sequence[int],
    log: Path,
    limit: float,
    ended: Event = _NEVER,
    **what: str,
) -> tuple[Status, Outcome]:
    """Run a part or make a package for at most `limit` seconds; its output is added to `log`."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory, log.open("ab") as output:
        answer = Path(directory) / "answer.json"
        output.write(f"== {' '.join(what.values())}\n".encode())
        output.flush()
        start = output.tell()
        code = _run(command_of(settings, cores, answer, **what), output.fileno(), limit, ended)
        if answer.is_file():  # it had ended, whatever the end of the process did
            outcome = Outcome(**json.loads(answer.read_text()))
            return _STATUSES[outcome.passed], outcome
    if code is None:
        return "timed out", Outcome(f"ended after {limit:.0f} s; {_last_line(log, start)}")
    return "crashed", Outcome(f"exit code {code}: {_last_line(log, start)}")


def _run(command: list[str], output: int, limit: float, ended: Event) -> int | None:
    """Return the exit code; None: it was ended. All that it had started ends with it."""
    deadline = time.monotonic() + limit
    # A group, and no session: what ends this command from outside is to end it, too.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
    )
    try:
        while (left := deadline - time.monotonic()) > 0 and not ended.is_set():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, _LOOK))
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a process that is left would hold the device
        process.wait()


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it printed nothing"
