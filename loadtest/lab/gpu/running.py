"""Runs parts one after the other, each in a process that may crash or hang by itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Protocol

from engine.errors import TokenweirError
from loadtest.errors import LoadTestError
from loadtest.lab.gpu import parts
from loadtest.lab.gpu.part import Outcome, Part, Result, Settings, Status

_FOREGROUND, _A_PACKAGE = 4, 2  # cores
_LAST_BYTES = 4096  # its end of a log says why a process crashed
_LOOK = 0.5  # seconds between two looks whether all is to end
_STATUSES: dict[bool | None, Status] = {None: "measured", True: "passed", False: "failed"}
_NEVER = Event()
_SPAWN = multiprocessing.get_context("spawn")  # neither gRPC nor CUDA survives a fork
Task = Callable[[str], Outcome]  # takes the name of a part or package


class Do(Protocol):
    """A function of a part or package, which another process can import."""

    def __call__(self, name: str, settings: Settings) -> Outcome: ...


def run_parts(
    chosen: Sequence[Part],
    settings: Settings,
    out: Path,
    budget: float,
    *,
    prepare: bool,
    run: Do = parts.run,
    make: Do = parts.make,
) -> Iterator[Part | Result]:
    """Yield every part when it begins, and its result; `budget` is in seconds, for all of them.

    A part that is expected to take more than is left is not begun. With `prepare` packages are made
    on cores that the parts do not have, and a part whose package is there goes before others.
    """
    deadline = time.monotonic() + budget
    todo = list(chosen)
    making = partial(make, settings=settings)
    with Packages(making, out / "packages.txt", deadline, beside=prepare) as packages:
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
            log, limit = out / "log.txt", min(part.limit, left)
            task = partial(run, settings=settings)
            status, outcome = run_task(task, part.name, packages.cores_left, log, limit)
            seconds = time.monotonic() - started
            yield Result(part.name, status, part.seconds, seconds, outcome.summary, outcome.found)


class Packages:
    """Packages in the making, each by a process; `beside` parts on cores that those do not have."""

    def __init__(self, make: Task, log: Path, deadline: float, *, beside: bool) -> None:
        self._make, self._log, self._deadline = make, log, deadline
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
            status, made = run_task(self._make, name, cores, own, left, self._ended)
        finally:
            self._free.put(cores)
        seconds = time.monotonic() - started
        with self._log.open("a") as log:
            log.write(own.read_text(errors="replace"))
            log.write(f"== {name}: {status} in {seconds:.0f} s: {made.summary}\n")
        own.unlink()
        return "" if status == "passed" else made.summary


def run_task(
    task: Task, name: str, cores: Sequence[int], log: Path, limit: float, ended: Event = _NEVER
) -> tuple[Status, Outcome]:
    """Do a task in a process for at most `limit` seconds, or until `ended`; output goes to `log`.

    All that the process has started ends with it: what is left would hold the device.
    """
    with log.open("ab") as output:
        output.write(f"== {name}\n".encode())
    start = log.stat().st_size
    answer, given = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_do, args=(task, name, cores, log, given))
    process.start()
    given.close()
    deadline = time.monotonic() + limit
    try:
        while (left := deadline - time.monotonic()) > 0 and not ended.is_set():
            if answer.poll(min(left, _LOOK)):
                outcome: Outcome = answer.recv()  # it had ended, whatever its process does now
                return _STATUSES[outcome.passed], outcome
        return "timed out", Outcome(f"ended after {limit:.0f} s; {_last_line(log, start)}")
    except EOFError:
        process.join()
        return "crashed", Outcome(f"exit code {process.exitcode}: {_last_line(log, start)}")
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _do(task: Task, name: str, cores: Sequence[int], log: Path, answer: Connection) -> None:
    """Do a task in this process; what is found to be wrong is an outcome as well."""
    os.setpgid(0, 0)  # a group, and no session: what ends the command from outside ends it, too
    os.sched_setaffinity(0, cores)
    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    try:
        outcome = task(name)
    except (TokenweirError, LoadTestError) as error:
        traceback.print_exc()
        outcome = Outcome(str(error), {"error": type(error).__name__}, passed=False)
    sys.stdout.flush()
    answer.send(outcome)


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it printed nothing"
